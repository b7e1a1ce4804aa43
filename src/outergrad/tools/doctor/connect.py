"""Connections between two sites, tried from both sides."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from outergrad.tools.doctor.sites import Site

CONNECT_S = 5.0
"""Longest time for a connection."""

STEP_S = 8.0
"""Longest time without a byte while measuring."""

_HELLO = "{token} {caller} {called}\n"


@dataclass
class Connected:
    """What came of the connections between two sites.

    Attributes:
        line: A connection to measure on; None if there is none.
        outgoing: Why this site could not open one to the other; None if it could.
        incoming: Whether the other could open one to this site.
    """

    line: socket.socket | None
    outgoing: str | None
    incoming: bool


def listen(address: str) -> socket.socket:
    """Listens at an address, on a port of the system's choice, as gloo does.

    Raises:
        OSError: There is no such address here.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.bind((address, 0))
        listener.listen(16)
    except OSError:
        listener.close()
        raise
    return listener


def connect(listener: socket.socket, me: Site, other: Site, token: str) -> Connected:
    """Connects two sites both ways at once, as firewalls may let one way pass alone.

    Both must call it at about the same time.

    Args:
        listener: Of this site.
        me: This site.
        other: The other.
        token: By which sites know each other.
    """
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(_accept, listener, _hello(token, other, me))
        called = pool.submit(_call, other, _hello(token, me, other))
        incoming, outgoing = accepted.result(), called.result()
    sockets = (incoming, outgoing) if me.rank < other.rank else (outgoing, incoming)
    lines = [line for line in sockets if isinstance(line, socket.socket)]
    for line in lines[1:]:
        line.close()
    for line in lines[:1]:
        line.settimeout(STEP_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connected(
        lines[0] if lines else None,
        outgoing if isinstance(outgoing, str) else None,
        incoming is not None,
    )


def _hello(token: str, caller: Site, called: Site) -> bytes:
    return _HELLO.format(token=token, caller=caller.rank, called=called.rank).encode()


def _call(other: Site, hello: bytes) -> socket.socket | str:
    """Opens a connection to a site, or tells why it cannot."""
    try:
        line = socket.create_connection((other.address, other.port), timeout=CONNECT_S)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    with suppress(OSError):
        line.sendall(hello)
        if receive(line, len(hello)) == hello:
            return line
    line.close()
    return "connected, but no answer"


def _accept(listener: socket.socket, hello: bytes) -> socket.socket | None:
    """Waits for the other site's connection; strangers' are closed."""
    until_s = time.monotonic() + CONNECT_S
    while (left_s := until_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        try:
            line, _ = listener.accept()
        except OSError:
            return None
        line.settimeout(min(1.0, left_s) if left_s > 0 else 0.1)
        with suppress(OSError):
            if receive(line, len(hello)) == hello:
                line.sendall(hello)
                return line
        line.close()
    return None


def receive(line: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        OSError: The other site has closed, or says nothing.
    """
    got = bytearray()
    while len(got) < nbytes:
        piece = line.recv(nbytes - len(got))
        if not piece:
            raise ConnectionError("the other site has closed the connection")
        got += piece
    return bytes(got)
