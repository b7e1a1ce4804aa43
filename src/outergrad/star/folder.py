"""The folder of a hub: its authority, its certificate, its sites, and its log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outergrad._whole_files import write_whole
from outergrad.star.authority import (
    DAYS,
    Identity,
    new_authority,
    new_hub,
    new_site,
    site_name,
    write_secret,
)
from outergrad.star.kit import Kit

_KEYS = {"authority": "authority.key", "hub": "hub.key"}
_CERTIFICATES = {"authority": "authority.pem", "hub": "hub.pem"}
_SITES, _ADDRESS = "sites.json", "address"


@dataclass(frozen=True)
class Site:
    """One that was invited.

    Attributes:
        name: in its certificate.
        serial: of its latest certificate: others of its name do not count any more.
        revoked: whether it may not take part any more.
    """

    name: str
    serial: int
    revoked: bool = False


class HubFolder:
    """Reads and writes it.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock, self._read = threading.Lock(), (0, 0, ())

    def create(self, address: str, hosts: Sequence[str] = ()) -> None:
        """An authority and a hub.

        Args:
            address: host and port that sites dial.
            hosts: other names and addresses by which they reach it.

        Raises:
            ValueError: the address is none.
            OSError: there is one already, or it cannot be written.
        """
        host = host_of(address)
        self.path.mkdir(parents=True, exist_ok=True)
        authority = new_authority()
        self._write("authority", authority)
        self._write("hub", new_hub(authority, list(dict.fromkeys([host, *hosts]))))
        write_whole(self.path / _ADDRESS, address + "\n")
        self._write_sites([])

    def invite(self, name: str, days: int = DAYS) -> Kit:
        """A kit for a site. One that it had before does not count any more.

        Args:
            name: of the site.
            days: how long it holds.

        Raises:
            ValueError: the name cannot be.
            OSError: this is no folder of a hub.
        """
        authority = self.identity("authority")
        identity = new_site(authority, site_name(name), days)
        invited = Site(name, identity.serial)
        sites = {site.name: site for site in self.sites()} | {name: invited}
        self._write_sites(sites.values())
        address = (self.path / _ADDRESS).read_text().strip()
        return Kit(name, address, identity.key, identity.certificate, authority.certificate)

    def revoke(self, name: str) -> None:
        """A site may not take part any more; a hub that runs hears of it.

        Raises:
            ValueError: there is no such site.
            OSError: this is no folder of a hub.
        """
        sites = {site.name: site for site in self.sites()}
        if name not in sites:
            raise ValueError(
                f"no site {name!r} was invited: there are {', '.join(sites) or 'none'}"
            )
        self._write_sites((sites | {name: replace(sites[name], revoked=True)}).values())

    def sites(self) -> Sequence[Site]:
        """All that were invited, in that order."""
        path = self.path / _SITES
        with self._lock:
            now = path.stat()
            key = now.st_mtime_ns, now.st_ino
            if key != self._read[:2]:
                self._read = (*key, tuple(Site(**one) for one in json.loads(path.read_text())))
            return self._read[2]

    def site(self, name: str) -> Site | None:
        """One that may take part."""
        return next((s for s in self.sites() if s.name == name and not s.revoked), None)

    def identity(self, of: str) -> Identity:
        """Of the "authority" or the "hub"."""
        key, certificate = self.path / _KEYS[of], self.path / _CERTIFICATES[of]
        return Identity(key.read_text(), certificate.read_text())

    def forget_keys(self) -> None:
        """Removes what it signs with: the log can still be checked."""
        for key in _KEYS.values():
            (self.path / key).unlink(missing_ok=True)

    @property
    def certificate_file(self) -> Path:
        """Of the hub: whoever has it can check the log."""
        return self.path / _CERTIFICATES["hub"]

    @property
    def log_file(self) -> Path:
        """Of what happened."""
        return self.path / "log.jsonl"

    def _write(self, of: str, identity: Identity) -> None:
        write_secret(self.path / _KEYS[of], identity.key)
        write_whole(self.path / _CERTIFICATES[of], identity.certificate)

    def _write_sites(self, sites: Iterable[Site]) -> None:
        told = [vars(site) for site in sites]
        write_whole(self.path / _SITES, json.dumps(told, indent=1) + "\n")


def host_of(address: str) -> str:
    """The host in an address.

    Raises:
        ValueError: it has no port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{address!r} is no address: hub.example.org:8443 is one")
    return host.strip("[]")
