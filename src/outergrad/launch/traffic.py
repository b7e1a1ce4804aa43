"""Network interfaces: the loopback of one machine, and the bytes that passed one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from outergrad.core.addresses import loopback

_INTERFACE = "GLOO_SOCKET_IFNAME"


Interfaces = Mapping[str, Sequence[str]]
"""Addresses by the names of interfaces."""


def interfaces() -> Interfaces:
    """Returns the addresses of each network interface that is up."""
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def loopback_name() -> str | None:
    """Returns the name of the interface by which this machine reaches itself; None if not known."""
    here = loopback()
    held = (name for name, addresses in interfaces().items() if here in addresses)
    return next(held, None)


def stay_on_loopback() -> None:
    """Keeps gloo's sockets on this machine, unless the user chose an interface."""
    if name := loopback_name():
        os.environ.setdefault(_INTERFACE, name)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Keeps gloo's sockets on this machine inside the block, as `stay_on_loopback`."""
    chosen = _INTERFACE in os.environ
    stay_on_loopback()
    try:
        yield
    finally:
        if not chosen:
            os.environ.pop(_INTERFACE, None)


HEADER_BYTES = 66
"""Ethernet, IP and TCP headers of one packet, with TCP's timestamps: 14 + 20 + 32.

Loopback counts no Ethernet header, which is too little to matter in its packets of 64 KiB.
"""


@dataclass(frozen=True)
class InterfaceTraffic:
    """Traffic sent through an interface, headers and acknowledgements included.

    Attributes:
        sent_bytes: Bytes sent.
        packets: Packets sent. The kernel may count a train of segments as one packet and adds the
            headers of one to the bytes.
    """

    sent_bytes: float = 0
    packets: float = 0

    @property
    def payload_bytes(self) -> float:
        """Bytes sent without the headers of the packets."""
        return self.sent_bytes - HEADER_BYTES * self.packets

    def __add__(self, other: InterfaceTraffic) -> InterfaceTraffic:
        return InterfaceTraffic(self.sent_bytes + other.sent_bytes, self.packets + other.packets)

    def __sub__(self, other: InterfaceTraffic) -> InterfaceTraffic:
        return InterfaceTraffic(self.sent_bytes - other.sent_bytes, self.packets - other.packets)

    def __truediv__(self, parts: int) -> InterfaceTraffic:
        return InterfaceTraffic(self.sent_bytes / parts, self.packets / parts)


@dataclass(frozen=True)
class InterfaceCounter:
    """Counters of an interface of this process's network namespace.

    Attributes:
        interface: Name of the interface.
        sharers: Number of sites that send through it; each is given an equal part.
    """

    interface: str
    sharers: int = 1

    def read(self) -> InterfaceTraffic:
        """Returns this site's part of the traffic since the interface exists."""
        counters = psutil.net_io_counters(pernic=True, nowrap=False)[self.interface]
        return InterfaceTraffic(counters.bytes_sent, counters.packets_sent) / self.sharers
