"""The network interface through which the processes of one machine talk."""

import socket

import psutil


def loopback_name() -> str | None:
    """Name of the interface that holds 127.0.0.1, if it can be told."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return None


def loopback_bytes() -> int | None:
    """Bytes sent through the loopback interface since the machine started, if counted."""
    counters = psutil.net_io_counters(pernic=True).get(loopback_name() or "")
    return counters.bytes_sent if counters else None
