"""Addresses as people write them, hosts and ports: "hub.example.org:8443", "[2001:db8::1]:8443"."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import NamedTuple

_WRITTEN = re.compile(r"(\[[^][]*\]|[^][:]*)(?::([^:]*))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_BRACKETS = "an IPv6 address stands in brackets, as [2001:db8::1]:8443"


class Address(NamedTuple):
    """A host and a port.

    Attributes:
        host: name or number, as `read_host` returns it: without brackets.
        port: of TCP; 0 for one that the system chooses.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """Returns the form that `read_address` reads: an IPv6 address stands in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, port: int | None = None, called: str = "") -> Address:
    """Parses an address.

    Args:
        text: host and port; an IPv6 address stands in brackets.
        port: of a text without one; None if it must have one.
        called: what the text is the value of, for the error, as "--listen=".

    Raises:
        ValueError: it is no address; the error says in one line why.
    """
    read = _WRITTEN.fullmatch(text)
    if read is None:
        why = "write the host and the port alone" if "/" in text else _BRACKETS
        raise _no_address(called, text, why)
    host, number = read.groups()
    if number is None and port is None:
        raise _no_address(called, text, "it has no port, as hub.example.org:8443 has")
    try:
        return Address(_host(host), port or 0 if number is None else _port(number))
    except ValueError as error:
        raise _no_address(called, text, str(error)) from None


def read_host(text: str, called: str = "") -> str:
    """Parses a name, or a number with or without brackets; returns a number in its one form.

    Certificates and calls compare numbers as texts: 2001:db8:0::1 must be 2001:db8::1 in both.

    Args:
        text: a host without a port.
        called: what the text is the value of, for the error, as "--host=".

    Raises:
        ValueError: it is neither; the error says in one line why.
    """
    if _WRITTEN.fullmatch(text) and ":" in text and not text.endswith("]"):
        raise _no_address(called, text, "leave out the port")
    try:
        return _host(text)
    except ValueError as error:
        raise _no_address(called, text, str(error)) from None


def loopback() -> str:
    """Returns the address by which this machine reaches itself: ::1 if it has IPv6 alone."""
    with suppress(OSError), listen_at("127.0.0.1"):
        return "127.0.0.1"
    return "::1"


def listen_at(number: str) -> socket.socket:
    """Listens at an address of this machine, IPv4 or IPv6, on a port that the system chooses.

    Raises:
        OSError: it is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    return socket.create_server((number, 0), family=family)


def _host(text: str) -> str:
    try:
        number = ip_address(re.sub(r"\[(.*)\]", r"\1", text))
    except ValueError:
        return _name(text)
    if number.version == 4:
        return str(number)
    if number.scope_id is not None:
        raise ValueError("what follows % names an interface of one machine alone")
    mapped = number.ipv4_mapped
    return str(mapped) if mapped else socket.inet_ntop(socket.AF_INET6, number.packed)


def _name(text: str) -> str:
    if text.startswith("["):
        raise ValueError("what stands in brackets is no IPv6 address")
    if re.fullmatch(r"[\d.]+", text):
        raise ValueError("an IPv4 address has four numbers up to 255, as 192.0.2.1")
    if not _NAME.fullmatch(text):
        why = "a name has letters from a to z, digits, - and . alone" if text else "it has no host"
        raise ValueError(why)
    return text


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError(f"a port is a number up to 65535, not {text!r}")
    return int(text)


def _no_address(called: str, text: str, why: str) -> ValueError:
    return ValueError(f"{called}{text!r} is no address: {why}")
