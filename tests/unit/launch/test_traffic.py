"""Bytes are what the interface counted."""

from __future__ import annotations

import socket

import pytest

from outergrad.launch.traffic import HEADER_BYTES, InterfaceCounter, InterfaceTraffic, loopback_name

LOOPBACK = loopback_name() or "lo"


def test_traffic_is_added_subtracted_and_shared():
    assert InterfaceTraffic(1000, 10) + InterfaceTraffic(500, 2) == InterfaceTraffic(1500, 12)
    assert InterfaceTraffic(1000, 10) - InterfaceTraffic(500, 2) == InterfaceTraffic(500, 8)
    assert InterfaceTraffic(1000, 10) / 4 == InterfaceTraffic(250, 2.5)
    assert InterfaceTraffic() + InterfaceTraffic(7, 1) == InterfaceTraffic(7, 1)


def test_the_payload_is_what_remains_without_headers():
    assert InterfaceTraffic(10 * (1448 + HEADER_BYTES), 10).payload_bytes == 14480
    assert InterfaceTraffic().payload_bytes == 0


def send(size: int) -> None:
    """Sends so many bytes to oneself."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        for _ in range(size // 1000):
            sender.sendall(bytes(1000))
            receiver.recv(1000, socket.MSG_WAITALL)


@pytest.mark.parametrize("sharers", [1, 4])
def test_at_least_what_a_socket_sent_is_counted_and_shared(sharers):
    counter = InterfaceCounter(LOOPBACK, sharers)
    before = counter.read()
    send(2_000_000)
    sent = counter.read() - before
    assert sent.sent_bytes >= 2_000_000 / sharers
    assert sent.packets >= 2000 / sharers
    assert sent.payload_bytes >= 0.95 * 2_000_000 / sharers


def test_sharers_divide_what_one_would_have():
    first = InterfaceCounter(LOOPBACK).read()
    shared = InterfaceCounter(LOOPBACK, sharers=3).read()
    last = InterfaceCounter(LOOPBACK).read()
    assert first.sent_bytes <= 3 * shared.sent_bytes <= last.sent_bytes + 1
    assert first.packets <= 3 * shared.packets <= last.packets + 1
