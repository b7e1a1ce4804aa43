"""A hub, and sites that are processes with network namespaces of their own."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from pathlib import Path

import outergrad as og
from outergrad.launch.links import Place, ShapedLink, parse_link
from outergrad.launch.namespaces import INTERFACE, qdiscs
from outergrad.star.folder import HubFolder
from outergrad.star.hub import GRACE_S
from outergrad.star.server import HubServer

PORT = 8443


def widen(hub: Place, link: ShapedLink, rate: str) -> None:
    """Gives both ends of the hub's cable another rate than those of the sites have.

    Args:
        hub: Place of the hub, the last of the places.
        link: Link that joins the places.
        rate: Rate as on the command line, or none.
    """
    if link.rate_bit_per_s is None or hub.namespace is None:
        return
    bridge, _, number = hub.namespace.rpartition("-")
    for namespace, interface in ((hub.namespace, INTERFACE), (f"{bridge}-hub", f"port{number}")):
        at = ["dev", interface]
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", *at, "root"], check=True)
        for discipline in qdiscs(parse_link(rate).rate_bit_per_s):
            add = ["tc", "-n", namespace, "qdisc", "add", *at, *discipline]
            subprocess.run(add, check=True)


def run_hub(folder: Path, place: Place, sites: int, grace_s: float = GRACE_S) -> list[float]:
    """Relays until all sites are done; returns the peak memory of this process, in MB.

    Args:
        folder: Empty folder, where the sites find their kits, and note that they are done.
        place: Place of the hub, behind those of the sites.
        sites: Number of sites.
        grace_s: Seconds for which a site may be away.
    """
    place.enter()
    made = HubFolder(folder / "hub")
    made.create(f"10.77.0.{sites + 1}:{PORT}", [])
    for rank in range(sites):
        made.invite(f"site-{rank}").write(folder / f"{rank}.part")
        os.rename(folder / f"{rank}.part", folder / f"{rank}.kit")
    server = HubServer(made, f"0.0.0.0:{PORT}", grace_s=grace_s)
    server.start()
    (folder / "listening").touch()
    while len(list(folder.glob("*.done"))) < sites:
        time.sleep(0.1)
    server.stop()
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]


def star_at(folder: Path, rank: int) -> og.Star:
    """Returns a site's transport over the hub, once that listens."""
    while not (folder / "listening").exists():
        time.sleep(0.05)
    return og.Star(kit=folder / f"{rank}.kit")


def say_done(folder: Path, rank: int) -> None:
    """Notes that a site does not need the hub any more."""
    (folder / f"{rank}.done").touch()
