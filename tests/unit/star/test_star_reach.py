"""Each reason why a site does not reach its hub has words of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from outergrad.star import reach
from outergrad.star.authority import new_authority, new_hub, new_site, read_kit
from outergrad.star.folder import HubFolder
from outergrad.star.reach import Obstacle, obstacle
from outergrad.star.server import HubServer
from stars import NAMES, folder, hub, kit_of


@pytest.fixture
def kit():
    return read_kit(kit_of(NAMES[0], folder()))


@contextmanager
def listening(*, answers: bytes | None) -> Iterator[str]:
    """The address of something that is no hub; None for a listener that never says anything."""
    held = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                one, _ = server.accept()
                held.append(one)
                if answers is not None:
                    one.sendall(answers)
                    one.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for one in held:
        one.close()


def test_a_hub_that_is_reached_is_no_obstacle(kit):
    with hub(1) as server:
        assert obstacle(f"127.0.0.1:{server.port}", kit) is None


def test_nobody_listens(kit):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = obstacle(f"127.0.0.1:{port}", kit)
    told = f"nobody listens on port {port} of 127.0.0.1: the hub does not run, or has another port"
    assert found == Obstacle(told)


def test_a_name_that_nobody_knows(kit, monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = obstacle("hub.example.org:8443", kit)
    told = "the name hub.example.org is not known here: check it, and this machine's DNS"
    assert found == Obstacle(told)


@pytest.mark.parametrize(
    ("error", "told"),
    [(TimeoutError(), "does not answer on port 1"), (OSError(113, "No route"), "(No route)")],
)
def test_an_address_that_is_not_reached(kit, monkeypatch, error, told):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    found = obstacle("10.0.0.1:1", kit)
    assert found is not None
    assert told in found.why
    assert not found.lasts


@pytest.mark.parametrize("answers", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_that_is_no_hub(kit, answers):
    with listening(answers=answers) as address:
        found = obstacle(address, kit, limit_s=0.5)
    assert found is not None
    assert "not in TLS" in found.why if answers is None else "is no hub" in found.why
    assert not found.lasts


def test_a_kit_of_another_hub(kit):
    foreign = replace(kit, authority=new_authority().certificate)
    with hub(1) as server:
        found = obstacle(f"127.0.0.1:{server.port}", foreign)
    assert found is not None
    assert "is not the hub of this kit: this is a kit of another hub" in found.why
    assert found.lasts


@pytest.mark.parametrize(
    ("hosts", "days", "told"),
    [
        (["hub.example.org"], 1, "is not for the name 127.0.0.1"),
        (["127.0.0.1"], -1, "is not valid now"),
    ],
)
def test_a_hub_with_another_certificate(tmp_path, hosts, days, told):
    made = HubFolder(tmp_path / "hub")
    made.create("127.0.0.1:0")
    made.invite("a").write(tmp_path / "a.kit")
    identity = new_hub(made.identity("authority"), hosts, days)
    (made.path / "hub.key").write_text(identity.key)
    (made.path / "hub.pem").write_text(identity.certificate)
    server = HubServer(made, "127.0.0.1:0")
    server.start()
    try:
        found = obstacle(f"127.0.0.1:{server.port}", read_kit(tmp_path / "a.kit"))
    finally:
        server.stop()
    assert found is not None
    assert told in found.why
    assert found.lasts


def test_a_kit_that_has_expired_is_told_without_a_call(kit, monkeypatch):
    late = new_site(folder().identity("authority"), NAMES[0], days=-1)
    monkeypatch.setattr(reach.socket, "create_connection", None)
    found = obstacle("127.0.0.1:1", replace(kit, certificate=late.certificate))
    assert found == Obstacle("the certificate in the kit has expired: ask for a new kit", True)
