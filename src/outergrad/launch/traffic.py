"""Bytes and packets sent through a network interface."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

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
