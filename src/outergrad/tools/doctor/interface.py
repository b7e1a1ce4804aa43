"""Checks of the network interface that gloo takes, and of the sites' addresses."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from outergrad.tools.doctor.findings import Finding, named, note, ok, problem, warning

_VIRTUAL = ("docker", "br-", "virbr", "veth", "tailscale", "wg", "tun", "tap")

Interfaces = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Taken:
    """The address at which gloo will listen.

    Attributes:
        address: None if gloo will not start.
        interface: That has it, where known.
        why: `variable`, `hostname`, or `fallback` where the name of the machine is no use.
    """

    address: str | None
    interface: str | None
    why: str

    @property
    def local(self) -> bool:
        """Whether other machines cannot reach it."""
        return self.address is None or ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """The addresses of every network interface that is up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def resolve(host: str) -> list[str]:
    """Addresses of a name, none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def taken_by_gloo(
    environment: Mapping[str, str],
    host: str,
    present: Interfaces,
    lookup: Callable[[str], list[str]] = resolve,
) -> Taken:
    """Which address gloo will take, by its own rules.

    Args:
        environment: Of this process.
        host: The name of this machine.
        present: Addresses of the interfaces.
        lookup: Resolves a name.
    """
    wanted = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted:
        return Taken(next(iter(present.get(wanted, ())), None), wanted, "variable")
    for address in lookup(host):
        holder = holder_of(address, present)
        if holder or ipaddress.ip_address(address).is_loopback:
            return Taken(address, holder, "hostname")
    return Taken("127.0.0.1", holder_of("127.0.0.1", present), "fallback")


def holder_of(address: str, present: Interfaces) -> str | None:
    """The interface that has an address."""
    return next((name for name, addresses in present.items() if address in addresses), None)


def best_interface(present: Interfaces) -> str | None:
    """The interface that probably leads to other machines."""
    outward = [name for name, addresses in present.items() if any(map(_reachable, addresses))]
    return min(outward, key=lambda name: name.startswith(_VIRTUAL), default=None)


def _reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local)


def choose_another(present: Interfaces) -> str:
    """What to do where gloo takes an interface that leads nowhere."""
    best = best_interface(present)
    if best is None:
        return "connect this machine to a network first"
    return f"export GLOO_SOCKET_IFNAME={best}  ({next(filter(_reachable, present[best]))})"


def check_interface(taken: Taken, host: str, present: Interfaces) -> Finding:
    """Whether gloo starts, and whether other machines can reach it.

    Args:
        taken: What gloo will take.
        host: The name of this machine.
        present: Addresses of the interfaces.
    """
    if taken.address is None:
        said = f"GLOO_SOCKET_IFNAME names {taken.interface}, which is not there or has no address"
        remedy = f"choose one of {', '.join(sorted(present))}, or unset it"
        return problem("interface", f"{said}: gloo will not start", remedy)
    said = f"gloo will use {taken.address} ({taken.interface or '?'}), {_because(taken, host)}"
    if not taken.local:
        return ok("interface", said)
    level = note if taken.why == "variable" else warning
    return level(
        "interface",
        f"{said}; that does for sites on this machine, but no other machine can reach it",
        choose_another(present),
    )


def _because(taken: Taken, host: str) -> str:
    return {
        "variable": "as GLOO_SOCKET_IFNAME says",
        "hostname": f"the address of this machine's name, {host}",
        "fallback": f"since this machine's name, {host}, is not known as an address of it",
    }[taken.why]


def check_addresses(addresses: Mapping[int, str]) -> list[Finding]:
    """Whether the sites on several machines listen where they should.

    Args:
        addresses: At which each site listens.
    """
    ips = {rank: ipaddress.ip_address(address) for rank, address in addresses.items()}
    if local := [rank for rank, ip in ips.items() if ip.is_loopback]:
        return [
            problem(
                "addresses",
                f"{named(local)} listens at {addresses[local[0]]}, where no other machine "
                "can reach it",
                "name the interface that leads to the others there, as GLOO_SOCKET_IFNAME=eth0",
            )
        ]
    if public := [rank for rank, ip in ips.items() if ip.is_global]:
        return [
            warning(
                "addresses",
                f"{named(public)} uses a public address: PyTorch neither encrypts nor asks who "
                "is calling",
                "use a private network or a VPN, and name its interface in GLOO_SOCKET_IFNAME",
            )
        ]
    return [ok("addresses", "all private: none is of the open internet")]
