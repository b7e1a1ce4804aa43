"""The link does what its name says, and the places count what passes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median

import psutil
import pytest

from at_best import at_best
from outergrad.launch import links
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import Place, ShapedLink, parse_link, places, what_is_missing

READABLE = [
    ("none", "0ms", ShapedLink(rate_bit_per_s=None), "none"),
    ("loopback", "0ms", ShapedLink(rate_bit_per_s=None, loopback=True), "loopback"),
    ("10mbit", "0ms", ShapedLink(rate_bit_per_s=1e7), "10mbit"),
    ("1Gbit", "0s", ShapedLink(rate_bit_per_s=1e9), "1gbit"),
    (" 2.5 MBIT ", "0ms", ShapedLink(rate_bit_per_s=2.5e6), "2.5mbit"),
    ("8kbit", "0ms", ShapedLink(rate_bit_per_s=8e3), "8kbit"),
    ("1500kbit", "0ms", ShapedLink(rate_bit_per_s=1.5e6), "1.5mbit"),
    ("100gbit", "0ms", ShapedLink(rate_bit_per_s=1e11), "100gbit"),
    ("100mbit", "40ms", ShapedLink(rate_bit_per_s=1e8, rtt_s=0.04), "100mbit-40ms"),
    ("100mbit", "0.04s", ShapedLink(rate_bit_per_s=1e8, rtt_s=0.04), "100mbit-40ms"),
    ("none", "0.5ms", ShapedLink(rate_bit_per_s=None, rtt_s=0.0005), "none-0.5ms"),
    (".5gbit", "10s", ShapedLink(rate_bit_per_s=5e8, rtt_s=10), "500mbit-10000ms"),
]
IMPOSSIBLE = [
    *[(rate, "0ms", r"--link .*(such as 10mbit)") for rate in ("", "10", "mbit", "10mb", "fast")],
    *[(rate, "0ms", r"--link.* from 8kbit") for rate in ("0mbit", "-1mbit", "nanmbit", "infgbit")],
    *[(rate, "0ms", r"--link.* to 100gbit") for rate in ("7.9kbit", "100.1gbit", "1e3mbit")],
    *[("none", rtt, r"--latency .*such as 40ms") for rtt in ("", "40", "-1ms", "nans", "4us")],
    ("none", "10.1s", r"--latency: 10\.1 s .*to 10s"),
    ("loopback", "40ms", r"--latency: .*leave out --latency, or use --link none"),
]
PIECE = 256 << 10
TEN_MBIT = ShapedLink(rate_bit_per_s=1e7)
shaped = pytest.mark.skipif(
    what_is_missing(TEN_MBIT, 3) is not None, reason=str(what_is_missing(TEN_MBIT, 3))
)
delayed = pytest.mark.skipif(
    what_is_missing(ShapedLink(rate_bit_per_s=None, rtt_s=0.04), 3) is not None,
    reason=str(what_is_missing(ShapedLink(rate_bit_per_s=None, rtt_s=0.04), 3)),
)


@pytest.mark.parametrize(("rate", "rtt", "link", "name"), READABLE)
def test_a_link_is_read_and_named(rate, rtt, link, name):
    assert parse_link(rate, rtt) == link
    assert link.name == name
    assert parse_link(*name.split("-")) == link


@pytest.mark.parametrize(("rate", "rtt", "said"), IMPOSSIBLE)
def test_an_impossible_link_is_refused_in_one_line(rate, rtt, said):
    with pytest.raises(RecipeError, match=said) as caught:
        parse_link(rate, rtt)
    assert "\n" not in str(caught.value)


def test_a_link_checks_itself():
    with pytest.raises(RecipeError, match=r"--link: a rate of 1 bit/s"):
        ShapedLink(rate_bit_per_s=1)
    with pytest.raises(RecipeError, match="loopback has neither"):
        ShapedLink(rate_bit_per_s=1e6, loopback=True)


def test_what_is_missing_is_told_with_a_remedy(monkeypatch):
    late = ShapedLink(rate_bit_per_s=1e7, rtt_s=0.04)
    has = {"ip": "ip", "tc": "tc"}
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(links.shutil, "which", has.get)
    monkeypatch.setattr(links, "can_relay", lambda: True)
    assert what_is_missing(late, 64) is None
    assert "--sites 65: --link 10mbit joins at most 64" in str(what_is_missing(TEN_MBIT, 65))
    monkeypatch.setattr(links, "can_relay", lambda: False)
    monkeypatch.setattr(links, "has_netem", lambda: False)
    assert "--latency needs netem" in str(what_is_missing(late, 2))
    assert what_is_missing(TEN_MBIT, 2) is None
    for tool in ("tc", "ip"):
        del has[tool]
        assert f"`{tool}`: install iproute2" in str(what_is_missing(TEN_MBIT, 2))
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
    assert "run as root" in str(what_is_missing(TEN_MBIT, 2))
    monkeypatch.setattr(links.sys, "platform", "darwin")
    assert "needs Linux" in str(what_is_missing(TEN_MBIT, 2))
    assert what_is_missing(parse_link("loopback"), 100) is None
    with pytest.raises(RecipeError, match="needs Linux"), places(2, TEN_MBIT):
        pass


def test_loopback_is_a_place_for_every_site(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    with places(3, parse_link("loopback")) as joined:
        assert len(joined) == 3
        joined[2].enter()
    addresses = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert "127.0.0.1" in [a.address for a in addresses]


@pytest.fixture
def at(monkeypatch):
    """Calls a function at a place, in a thread that goes there."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is restored

    def call(place, function, *arguments):
        def work():
            place.enter()
            return function(*arguments)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    return call


@contextmanager
def connected(at, server_address, server, client):
    """Yields both ends of a TCP connection; a socket stays where it was made."""
    with ExitStack() as stack:
        listener = stack.enter_context(at(server, socket.create_server, (server_address, 0)))
        listener.settimeout(10)
        one = stack.enter_context(at(client, socket.create_connection, listener.getsockname(), 10))
        other = stack.enter_context(listener.accept()[0])
        other.settimeout(10)
        yield one, other


def sent_bytes(place):
    command = ["ip", "-n", place.namespace, "-s", "-j", "link", "show", place.interface]
    shown = subprocess.run(command, capture_output=True, check=True)
    return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]


def bounce(one, other):
    """Seconds that a byte takes to the other side and back."""
    start_s = time.monotonic()
    for sender, receiver in ((one, other), (other, one)):
        sender.sendall(b".")
        assert receiver.recv(1) == b"."
    return time.monotonic() - start_s


def stream(one, other, size):
    """Seconds until the other side has received each further 256 KiB of so many bytes."""
    start_s = time.monotonic()
    came_s, received = [], 0
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(one.sendall, bytes(size))
        while received < size:
            received += len(other.recv(min(size - received, 1 << 16)))
            if received >= PIECE * (len(came_s) + 1):
                came_s.append(time.monotonic() - start_s)
        sent.result()
    return came_s


def rates_of(place, one, other, size):
    """Bits per second on the interface of a place, by its counter: of all, and of the usual piece.

    Where the machine itself stands still now and then, the first is too low, the second too high.
    """
    before = sent_bytes(place)
    came_s = stream(one, other, size)
    counted = sent_bytes(place) - before
    assert 1.0 < counted / size < 1.08
    piece_s = median(later - earlier for earlier, later in pairwise(came_s))
    return counted * 8 / came_s[-1], counted / size * PIECE * 8 / piece_s


def assert_rate(place, one, other, size, bit_per_s):
    """That a stream from one place to another is as fast as the link, and no faster.

    The machine may stand still for half of a stream, not longer.
    """
    wholes = []

    def usual():
        whole, piece = rates_of(place, one, other, size)
        wholes.append(whole)
        return min(piece, 2 * whole)

    assert at_best(usual, enough=0.9 * bit_per_s) > 0.9 * bit_per_s
    assert max(wholes) < 1.02 * bit_per_s


def usual_bounce(one, other):
    """The median seconds of nine round trips."""
    return median(bounce(one, other) for _ in range(9))


@shaped
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("sites", [2, 3])
def test_every_site_reaches_every_other_at_the_rate(at, sites):
    with places(sites, parse_link("50mbit")) as joined:
        time.sleep(0.5)
        assert [sent_bytes(place) for place in joined] == [0] * sites  # nothing but the exchange
        last = joined[-1]
        for server, place in enumerate(joined[:-1]):
            with connected(at, f"10.77.0.{server + 1}", place, last) as (one, other):
                assert bounce(one, other) < 0.01
        with connected(at, "10.77.0.1", joined[0], last) as (one, other):
            assert one.getsockname()[0] == f"10.77.0.{sites}"
            assert_rate(last, one, other, 3 << 20, 50e6)


@shaped
@pytest.mark.slow
@pytest.mark.alone
def test_what_a_site_receives_is_limited_too(at):
    with (
        places(3, parse_link("50mbit")) as joined,
        connected(at, "10.77.0.1", joined[0], joined[1]) as first,
        connected(at, "10.77.0.1", joined[0], joined[2]) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        start_s = time.monotonic()
        for ended in [pool.submit(stream, *pair, 1 << 20) for pair in (first, second)]:
            ended.result()
        assert (2 << 20) * 8 / (time.monotonic() - start_s) < 52e6


@delayed
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("sites", [2, 3])
def test_the_round_trip_takes_its_time_and_the_rate_stays(at, sites):
    with places(sites, parse_link("50mbit", "20ms")) as joined:
        last = joined[-1]
        with connected(at, "10.77.0.1", joined[0], last) as (one, other):
            trips_per_s = at_best(lambda: 1 / usual_bounce(one, other), enough=1 / 0.022)
            assert 1 / trips_per_s == pytest.approx(0.02, abs=0.002)
            assert_rate(last, one, other, 4 << 20, 50e6)


def test_a_place_that_is_gone_cannot_be_entered(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(FileNotFoundError, match="outergrad-0-gone"):
        Place("outergrad-0-gone", "link0").enter()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
