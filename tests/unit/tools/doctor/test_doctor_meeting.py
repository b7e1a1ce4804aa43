from __future__ import annotations

import socket
import time

import pytest

from ipv6 import needs_ipv6
from outergrad.launch.errors import RecipeError
from outergrad.tools.doctor.meeting import (
    Meeting,
    UnmetError,
    meeting_at,
    meeting_from,
    open_store,
    why_no_store,
    why_unreachable,
)

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_torchruns_environment():
    there = Meeting(rank=1, sites=2, host="10.0.0.1", port=29400, hosted=True, attempt=3)
    assert meeting_from(TORCHRUN) == there


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_ADDR": "[fd00::1]"}, r"MASTER_ADDR=\[fd00::1\] has brackets.*set it to fd00::1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, not 'http'"),
        ({"RANK": "2"}, "rank 2 is not one of 2 sites"),
    ],
)
def test_a_broken_environment_is_a_mistake(changed, said):
    with pytest.raises(RecipeError, match=said):
        meeting_from({**TORCHRUN, **changed})


@pytest.mark.parametrize(
    ("master", "host", "port"),
    [
        ("10.0.0.1:1234", "10.0.0.1", 1234),
        ("hospital-a", "hospital-a", 29500),
        ("[fd00::2]:77", "fd00::2", 77),
        ("[fd00:0::2]", "fd00::2", 29500),
    ],
)
def test_master(master, host, port):
    meeting = meeting_at(master, 0, 2)
    assert (meeting.host, meeting.port) == (host, port)


@pytest.mark.parametrize(
    ("master", "why"),
    [
        (":29500", "it has no host"),
        ("a:b", "a port is a number up to 65535, not 'b'"),
        ("a:0", "has port 0"),
        ("a:65536", "not '65536'"),
        ("fd00::2", r"an IPv6 address stands in brackets, as \[2001:db8::1\]:8443"),
    ],
)
def test_master_that_cannot_be_read(master, why):
    with pytest.raises(RecipeError, match=f"^--master='{master}' .*{why}"):
        meeting_at(master, 0, 2)


@pytest.mark.parametrize("master", ["[fd00::2]:77", "10.0.0.1:77"])
def test_a_meeting_is_named_as_it_is_written(master):
    said, _ = why_unreachable(meeting_at(master, 1, 2), TimeoutError(), 5)
    assert f"cannot reach site 0 at {master} within" in said


def test_nobody_listens(free_port):
    began_s = time.monotonic()
    said = rf"site 1 cannot reach site 0 at 127\.0\.0\.1:{free_port} .*nothing listens"
    with pytest.raises(UnmetError, match=said):
        open_store(meeting_at(f"127.0.0.1:{free_port}", 1, 2), 0.5)
    assert time.monotonic() - began_s < 2


def test_an_unknown_name():
    with pytest.raises(UnmetError, match=r"the name no-such-machine\.invalid is unknown"):
        open_store(meeting_at("no-such-machine.invalid:1", 1, 2), 0.2)


def test_the_port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UnmetError, match=f"cannot listen on port {port}"):
            open_store(meeting_at(f"127.0.0.1:{port}", 0, 2), 1)


def test_site_0_with_another_machines_address():
    said, _ = why_unreachable(meeting_at("10.0.0.9", 0, 2), TimeoutError(), 5)
    assert "site 0 cannot reach itself at 10.0.0.9:29500" in said


def test_a_name_whose_first_address_is_silent(monkeypatch):
    places = [(0, 0, 0, "", (number, 29500)) for number in ("fd00::9", "10.0.0.9")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    meeting = meeting_at("hospital-a", 1, 2)
    said, remedy = why_no_store(meeting, "10.0.0.9")
    assert said.startswith("fd00::9, the first address of hospital-a, is silent")
    assert "10.0.0.9" in remedy
    for first in ("fd00::9", ""):
        said, _ = why_no_store(meeting, first)
        assert "not site 0 of a training" in said


def test_a_silent_address_means_a_firewall():
    said, remedy = why_unreachable(meeting_at("10.0.0.9", 1, 2), TimeoutError("timed out"), 30)
    assert "site 1 cannot reach site 0 at 10.0.0.9:29500 within 30 s: no answer" in said
    assert "firewall" in remedy


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_two_sites_share_a_store(free_port, host):
    stores = [open_store(meeting_at(f"{host}:{free_port}", rank, 2), 5) for rank in (0, 1)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
