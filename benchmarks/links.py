"""Places for the sites of a benchmark to run: loopback, or shaped network namespaces.

A shaped link needs Linux, root and Debian's ``iproute2``. Every name carries the number
of the process that made it, and everything is removed on leaving the context manager,
also after an exception, Ctrl-C, SIGTERM or a closed terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RATES_BIT_PER_S = {"1gbit": 10**9, "100mbit": 10**8, "10mbit": 10**7}
_INTERFACE = "link0"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one site runs.

    Attributes:
        prefix: What goes before a command to run it there.
        interface: The network interface that carries the exchange.
        address: The address that other sites reach this one at.
    """

    prefix: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = "127.0.0.1"


@contextlib.contextmanager
def places(sites: int, link: str, *, netns: bool = False) -> Iterator[list[Place]]:
    """Yields one place per site, joined by ``link``.

    Args:
        sites: Number of sites.
        link: ``"none"`` for an unshaped link, or a key of ``RATES_BIT_PER_S``.
        netns: Whether an unshaped link joins namespaces too, instead of being loopback.
    """
    if link == "none" and not netns:
        yield [Place()] * sites
    else:
        with namespaces(sites, RATES_BIT_PER_S.get(link)) as joined:
            yield joined


@contextlib.contextmanager
def namespaces(sites: int, rate_bit_per_s: int | None = None) -> Iterator[list[Place]]:
    """Yields one network namespace per site, two joined by a cable, more by a bridge.

    Args:
        sites: Number of sites.
        rate_bit_per_s: What each end of each cable may send; None for no limit.

    Raises:
        RuntimeError: Not root, ``iproute2`` is missing, or a command of it failed.
    """
    _require_tools()
    _remove_abandoned()
    names = [f"outergrad-{os.getpid()}-{site}" for site in range(sites)]
    with _exit_on_signals(), contextlib.ExitStack() as cleanup:
        for name in names:
            _add_namespace(name, cleanup)
        ends = _cable(names) if sites == 2 else _bridge(names, cleanup)
        if rate_bit_per_s is not None:
            for namespace, interface in ends:
                _shape(namespace, interface, rate_bit_per_s)
        yield [_address(name, site) for site, name in enumerate(names)]


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise RuntimeError("A shaped link needs root: run as root, or use --link none.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"A shaped link needs `{tool}`: install the package iproute2.")


def _remove_abandoned() -> None:
    """Removes what a run left behind that was killed outright."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for name in re.findall(r"^outergrad-\d+-\w+", listed.stdout, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _ip("netns", "del", name, check=False)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turns the signals that would end the process at once into an ordinary exit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_namespace(name: str, cleanup: contextlib.ExitStack) -> None:
    # Registered first: an interrupt between the two commands must not leave it behind.
    cleanup.callback(_ip, "netns", "del", name, check=False)
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _cable(names: list[str]) -> list[tuple[str, str]]:
    first, second = names
    _ip(
        *("link", "add", _INTERFACE, "netns", first, "type", "veth"),
        *("peer", "name", _INTERFACE, "netns", second),
    )
    return [(name, _INTERFACE) for name in names]


def _bridge(names: list[str], cleanup: contextlib.ExitStack) -> list[tuple[str, str]]:
    """Joins all sites by a bridge, which lives in a namespace of its own."""
    hub = f"outergrad-{os.getpid()}-hub"
    _add_namespace(hub, cleanup)
    _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
    _ip("-n", hub, "link", "set", "bridge0", "up")
    ends = []
    for site, name in enumerate(names):
        port = f"port{site}"
        _ip(
            *("link", "add", _INTERFACE, "netns", name, "type", "veth"),
            *("peer", "name", port, "netns", hub),
        )
        _ip("-n", hub, "link", "set", port, "master", "bridge0", "up")
        ends += [(name, _INTERFACE), (hub, port)]
    return ends


def _shape(namespace: str, interface: str, rate_bit_per_s: int) -> None:
    """Limits what an interface sends.

    The burst is what passes at full speed after a pause: two packets, or 0.25 ms worth of
    the rate, so that a step of a few kilobytes does not slip through unshaped. The queue is
    long enough that TCP loses nothing; one stream then reaches 95% of the rate as payload.
    """
    burst_bytes = max(4096, rate_bit_per_s // 8 // 4000)
    limit_bytes = max(1 << 20, rate_bit_per_s // 8 // 20)
    _run(
        *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
        *("rate", f"{rate_bit_per_s}bit", "burst", f"{burst_bytes}b", "limit", f"{limit_bytes}b"),
    )


def _address(name: str, site: int) -> Place:
    address = f"10.77.0.{site + 1}"
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", _INTERFACE)
    _ip("-n", name, "link", "set", _INTERFACE, "up")
    prefix = ("ip", "netns", "exec", name)
    return Place(prefix=prefix, interface=_INTERFACE, address=address)


def _ip(*arguments: str, check: bool = True) -> None:
    _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> None:
    # A session of its own keeps Ctrl-C from ending the command that cleans up.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
