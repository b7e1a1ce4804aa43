"""Checks of the network interface that gloo uses, and of its reachability for other sites."""

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
    """Address at which gloo will listen, and its interface, if known."""

    address: str | None  # None if gloo will not start
    interface: str | None
    why: str  # "variable", "hostname", or "fallback" if the machine's name does not help


def interfaces() -> dict[str, list[str]]:
    """Addresses of each network interface that is up."""
    state, kinds = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
        if name in state and state[name].isup
    }


def resolve(host: str) -> list[str]:
    """Addresses of a host name; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def taken_here(environment: Mapping[str, str]) -> Taken:
    """Returns the address that gloo will use on this machine."""
    return taken_by_gloo(environment, socket.gethostname(), interfaces())


def taken_by_gloo(
    environment: Mapping[str, str],
    host: str,
    present: Interfaces,
    lookup: Callable[[str], list[str]] = resolve,
) -> Taken:
    """Returns the address that gloo will use, by its own rules, on a machine of this name."""
    if wanted := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return Taken(next(iter(present.get(wanted, ())), None), wanted, "variable")
    for address in lookup(host):
        holder = _holder(address, present)
        if holder or ipaddress.ip_address(address).is_loopback:
            return Taken(address, holder, "hostname")
    return Taken("127.0.0.1", _holder("127.0.0.1", present), "fallback")


def _holder(address: str, present: Interfaces) -> str | None:
    return next((name for name, addresses in present.items() if address in addresses), None)


def best_interface(present: Interfaces) -> str | None:
    """Returns the interface that probably leads to other machines."""
    outward = [name for name, addresses in present.items() if any(map(_reachable, addresses))]
    return min(outward, key=lambda name: name.startswith(_VIRTUAL), default=None)


def _reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local)


def check_interface(taken: Taken, host: str, present: Interfaces) -> Finding:
    """Checks that gloo starts on the machine of this name, and that others can reach it."""
    if taken.address is None:
        said = f"GLOO_SOCKET_IFNAME names {taken.interface}, which is not there or has no address"
        remedy = f"choose one of {', '.join(sorted(present))}, or unset it"
        return problem("interface", f"{said}: gloo will not start", remedy)
    because = {
        "variable": "as GLOO_SOCKET_IFNAME says",
        "hostname": f"the address of this machine's name, {host}",
        "fallback": f"since this machine's name, {host}, is not known as an address of it",
    }[taken.why]
    said = f"gloo will use {taken.address} ({taken.interface or '?'}), {because}"
    if not ipaddress.ip_address(taken.address).is_loopback:
        return ok("interface", said)
    said += "; that does for sites on this machine, but no other machine can reach it"
    remedy = "connect this machine to a network first"
    if best := best_interface(present):
        address = next(filter(_reachable, present[best]))
        remedy = f"export GLOO_SOCKET_IFNAME={best}  ({address})"
    level = note if taken.why == "variable" else warning
    return level("interface", said, remedy)


def check_addresses(addresses: Mapping[int, str]) -> list[Finding]:
    """Checks that sites on several machines listen at suitable addresses, given by rank."""
    ips = {rank: ipaddress.ip_address(address) for rank, address in addresses.items()}
    if local := [rank for rank, ip in ips.items() if ip.is_loopback]:
        said = f"{named(local)} listens at {addresses[local[0]]}, where no other machine "
        said += "can reach it"
        remedy = "name the interface that leads to the others there, as GLOO_SOCKET_IFNAME=eth0"
        return [problem("addresses", said, remedy)]
    if public := [rank for rank, ip in ips.items() if ip.is_global]:
        said = f"{named(public)} uses a public address: PyTorch neither encrypts nor asks who "
        said += "is calling"
        remedy = "use a private network or a VPN, and name its interface in GLOO_SOCKET_IFNAME"
        return [warning("addresses", said, remedy)]
    return [ok("addresses", "all private: none is of the open internet")]
