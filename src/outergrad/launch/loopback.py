"""Loopback interface, over which the processes of one machine communicate."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_INTERFACE = "GLOO_SOCKET_IFNAME"


def loopback_name() -> str | None:
    """Returns the name of the interface that holds 127.0.0.1; None if not known."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == "127.0.0.1" for a in addresses):
            return name
    return None


def loopback_bytes() -> int | None:
    """Returns the bytes sent over loopback since the machine started; None if not counted."""
    counters = psutil.net_io_counters(pernic=True).get(loopback_name() or "")
    return counters.bytes_sent if counters else None


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
