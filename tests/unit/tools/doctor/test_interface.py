from __future__ import annotations

import socket

import pytest

from outergrad.tools.doctor.findings import Level
from outergrad.tools.doctor.machine import (
    Taken,
    best_interface,
    check_addresses,
    check_interface,
    check_kinds,
    interfaces,
    resolve,
    taken_by_gloo,
)

PRESENT = {
    "lo": ["127.0.0.1", "::1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "eth6": ["fd00::5", "fe80::2"],
    "cable": ["fe80::3"],
    "down": [],
}

CASES = {
    "by its name": ({}, ["10.0.0.5"], Taken("10.0.0.5", "eth0", "hostname"), Level.OK),
    "Debian's 127.0.1.1": ({}, ["127.0.1.1"], Taken("127.0.1.1", None, "hostname"), Level.WARNING),
    "unknown name": ({}, [], Taken("127.0.0.1", "lo", "fallback"), Level.WARNING),
    "another machine's": ({}, ["10.9.9.9"], Taken("127.0.0.1", "lo", "fallback"), Level.WARNING),
    "chosen": ({"GLOO_SOCKET_IFNAME": "eth0"}, [], Taken("10.0.0.5", "eth0", "variable"), Level.OK),
    "IPv6 by its name": ({}, ["fd00::5"], Taken("fd00::5", "eth6", "hostname"), Level.OK),
    "an interface with IPv6": (
        {"GLOO_SOCKET_IFNAME": "eth6"},
        [],
        Taken("fd00::5", "eth6", "variable"),
        Level.OK,
    ),
    "an address of one cable": (
        {"GLOO_SOCKET_IFNAME": "cable"},
        [],
        Taken("fe80::3", "cable", "variable"),
        Level.PROBLEM,
    ),
    "IPv6's loopback": ({}, ["::1"], Taken("::1", "lo", "hostname"), Level.WARNING),
    "chosen loopback": (
        {"GLOO_SOCKET_IFNAME": "lo"},
        ["10.0.0.5"],
        Taken("127.0.0.1", "lo", "variable"),
        Level.NOTE,
    ),
    "no such": (
        {"GLOO_SOCKET_IFNAME": "eth9"},
        ["10.0.0.5"],
        Taken(None, "eth9", "variable"),
        Level.PROBLEM,
    ),
    "without address": (
        {"GLOO_SOCKET_IFNAME": "down"},
        ["10.0.0.5"],
        Taken(None, "down", "variable"),
        Level.PROBLEM,
    ),
}


@pytest.mark.parametrize(("environment", "found", "taken", "level"), CASES.values(), ids=CASES)
def test_what_gloo_takes(environment, found, taken, level):
    assert taken_by_gloo(environment, "host", PRESENT, lambda _: found) == taken
    (finding,) = check_interface(taken, "host", PRESENT)
    assert finding.level == level
    if level == Level.WARNING:
        assert finding.remedy == "export GLOO_SOCKET_IFNAME=eth0  (10.0.0.5)"


def test_the_interface_to_take_is_none_of_containers():
    assert best_interface(PRESENT) == ("eth0", "10.0.0.5")
    alone = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"]}
    assert best_interface(alone) == ("docker0", "172.17.0.1")
    assert best_interface({"lo": ["127.0.0.1"], "eth0": ["169.254.3.4", "fe80::1"]}) is None
    of_ipv6 = {"lo": ["127.0.0.1", "::1"], "eth0": ["fe80::1", "fd00::5"]}
    assert best_interface(of_ipv6) == ("eth0", "fd00::5")


def test_this_machine_has_interfaces_and_a_name():
    assert any("127.0.0.1" in addresses for addresses in interfaces().values())
    assert resolve("localhost")
    assert resolve("no-such-machine.invalid") == []
    assert taken_by_gloo({}, socket.gethostname(), interfaces()).address


def test_addresses_of_several_machines():
    (private,) = check_addresses({0: "10.0.0.1", 1: "192.168.1.7"})
    assert private.level == Level.OK
    (public,) = check_addresses({0: "10.0.0.1", 1: "8.8.8.8"})
    assert (public.level, "site 1" in public.said) == (Level.WARNING, True)
    (local,) = check_addresses({0: "127.0.1.1", 1: "8.8.8.8"})
    assert (local.level, "site 0" in local.said) == (Level.PROBLEM, True)
    (private,) = check_addresses({0: "fd00::1", 1: "fd00::2"})
    assert private.level == Level.OK
    (public,) = check_addresses({0: "fd00::1", 1: "2600::1"})
    assert (public.level, "site 1" in public.said) == (Level.WARNING, True)


def test_sites_that_listen_by_ipv4_and_by_ipv6_are_told_apart():
    assert [*check_kinds({0: "10.0.0.1", 1: "10.0.0.2"})] == []
    assert [*check_kinds({0: "fd00::1", 1: "fd00::2"})] == []
    (mixed,) = check_kinds({0: "10.0.0.1", 1: "fd00::2", 2: "fd00::3"})
    assert mixed.level == Level.PROBLEM
    assert mixed.said.startswith("site 0 by IPv4, at 10.0.0.1, and sites 1 and 2 by IPv6")
