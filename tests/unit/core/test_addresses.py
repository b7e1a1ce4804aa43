"""Addresses are read in one form, and what is wrong with one is said in a line."""

from __future__ import annotations

import socket

import pytest

from outergrad.core.addresses import Address, loopback, read_address, read_host

READ = {
    "hub.example.org:8443": ("hub.example.org", 8443),
    "hub:0": ("hub", 0),
    "192.0.2.1:8443": ("192.0.2.1", 8443),
    "[2001:db8::1]:8443": ("2001:db8::1", 8443),
    "[::]:8443": ("::", 8443),
    "[2001:0DB8:0:0::0:1]:8443": ("2001:db8::1", 8443),
    "[::ffff:192.0.2.1]:8443": ("192.0.2.1", 8443),
    "hub-1.example.org:65535": ("hub-1.example.org", 65535),
}
WRONG = {
    "2001:db8::1": "an IPv6 address stands in brackets",
    "2001:db8::1:8443": "an IPv6 address stands in brackets",
    "https://hub:8443": "write the host and the port alone",
    "hub:8443/": "a port is a number up to 65535, not '8443/'",
    "[2001:db8::1]": "it has no port",
    "hub.example.org": "it has no port",
    "": "it has no port",
    ":8443": "it has no host",
    "[]:8443": "what stands in brackets is no IPv6 address",
    "[hub]:8443": "what stands in brackets is no IPv6 address",
    "[2001:db8::1::2]:8443": "what stands in brackets is no IPv6 address",
    "[fe80::1%eth0]:8443": "what follows % names an interface of one machine alone",
    "10.0.0.300:8443": "an IPv4 address has four numbers",
    "hub:": "a port is a number up to 65535, not ''",
    "hub:http": "not 'http'",
    "hub:65536": "not '65536'",
    "hub:-1": "not '-1'",
    "h ub:1": "a name has letters",
    "hub\x1b:1": "a name has letters",
}


@pytest.mark.parametrize(("text", "read"), READ.items())
def test_what_can_be_read(text, read):
    assert read_address(text) == read
    assert read_address(str(read_address(text))) == read


@pytest.mark.parametrize(("text", "why"), WRONG.items())
def test_what_is_wrong_is_said_in_a_line(text, why):
    with pytest.raises(ValueError, match="is no address") as raised:
        read_address(text)
    told = str(raised.value)
    assert told.startswith(f"{text!r} is no address: ")
    assert why in told
    assert told.isprintable()


def test_a_port_may_be_left_out_where_there_is_a_default():
    assert read_address("hub", 29500) == ("hub", 29500)
    assert read_address("[fd00::2]", 29500) == ("fd00::2", 29500)
    with pytest.raises(ValueError, match="stands in brackets"):
        read_address("fd00::2", 29500)


def test_only_ipv6_stands_in_brackets():
    assert str(Address("fd00::2", 1)) == "[fd00::2]:1"
    assert str(Address("10.0.0.1", 1)) == "10.0.0.1:1"
    assert str(Address("hub", 1)) == "hub:1"


@pytest.mark.parametrize("text", ["2001:db8:0::1", "[2001:db8::1]", "2001:DB8::0.0.0.1"])
def test_a_host_alone_needs_no_brackets(text):
    assert read_host(text) == "2001:db8::1"


@pytest.mark.parametrize("text", ["hub:8443", "[::1]:8443"])
def test_a_host_alone_has_no_port(text):
    with pytest.raises(ValueError, match="leave out the port"):
        read_host(text)


def test_a_machine_without_ipv4_reaches_itself_by_ipv6(monkeypatch):
    assert loopback() == "127.0.0.1"

    def none(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(socket, "create_server", none)
    assert loopback() == "::1"
