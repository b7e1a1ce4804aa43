"""Connections through NVFLARE: bytes keep their order, and clients are who their cells are."""

from __future__ import annotations

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare", reason="nvflare is not installed")

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.tie.defs import Constant
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.message import Message

from outergrad.integrations.nvflare import tunnel
from outergrad.integrations.nvflare.server import KIT, HubApplet, HubConnector, StarController
from outergrad.integrations.nvflare.tunnel import CHANNEL, OPEN, Tunnels

CLIENT, SERVER = "site-a.job", "server.job"


class _Network:
    """Cells that hear messages in another order than they were sent."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.cells: dict[str, _Cell] = {}
        self.pool, self._held = pool, []
        self._order, self._lock = random.Random(0), threading.Lock()

    def cell(self, name: str) -> _Cell:
        self.cells[name] = _Cell(self, name)
        return self.cells[name]

    def fire(self, action) -> None:
        with self._lock:
            self._held.insert(self._order.randint(0, len(self._held)), action)
        self.pool.submit(lambda: self._held.pop()())


class _Cell:
    def __init__(self, network: _Network, name: str) -> None:
        self._network, self._name, self.callbacks = network, name, {}

    def register_request_cb(self, channel, topic, cb) -> None:
        self.callbacks[topic] = cb

    def _said(self, message: Message) -> Message:
        message.set_header(MessageHeaderKey.ORIGIN, self._name)
        return message

    def fire_and_forget(self, channel, topic, target, message, optional):
        peer = self._network.cells[target]
        self._network.fire(lambda: peer.callbacks[topic](self._said(message)))
        return {target: ""}

    def send_request(self, channel, topic, target, message, timeout):
        return self._network.cells[target].callbacks[topic](self._said(message))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def network():
    with ThreadPoolExecutor(8) as pool:
        yield _Network(pool)


def test_bytes_come_out_as_they_went_in_whatever_order_messages_come_in(network):
    near, far = Tunnels(network.cell(CLIENT)), Tunnels(network.cell(SERVER))
    (script, here), (there, hub) = tcp_pair(), tcp_pair()
    far.carry("one", CLIENT, there)
    near.carry("one", SERVER, here)
    sent = random.Random(1).randbytes(3_000_000)

    def say() -> None:
        script.sendall(sent)
        script.shutdown(socket.SHUT_WR)

    with ThreadPoolExecutor(1) as other:
        other.submit(say)
        received = b"".join(iter(lambda: hub.recv(1 << 16), b""))
    assert received == sent
    script.close()
    hub.close()


def test_what_is_long_goes_in_few_messages_and_what_is_short_at_once(network, monkeypatch):
    near, sent = Tunnels(network.cell(CLIENT)), SimpleQueue()
    (there, script), later = tcp_pair(), [b"-" * 50_000] * 3
    network.cell(SERVER).register_request_cb(CHANNEL, "bytes", lambda said: sent.put(said.payload))

    def more_comes(_):
        if later:
            script.sendall(later.pop())

    monkeypatch.setattr(tunnel, "time", SimpleNamespace(sleep=more_comes))
    near.carry("one", SERVER, there)
    for piece, whole in ((1_000, 1_000), (50_000, 200_000)):
        script.sendall(b"-" * piece)
        assert len(sent.get(timeout=5)) == whole
    script.close()


def test_a_message_that_never_comes_ends_the_connection(network):
    far = Tunnels(network.cell(SERVER))
    (there, hub), client = tcp_pair(), network.cell(CLIENT)
    client.register_request_cb(CHANNEL, "bytes", lambda message: None)
    far.carry("one", CLIENT, there)
    end = far._ends[CLIENT, "one"]
    for number in range(1, 2000):
        end.take(number, b"-")
    assert hub.recv(1) == b""
    hub.close()


def test_a_cell_that_has_ended_ends_the_connection(network, monkeypatch):
    near = Tunnels(network.cell(CLIENT))
    (there, script), _ = tcp_pair(), network.cell(SERVER)

    def ended(*_, **__) -> None:
        raise RuntimeError("Messenger is not running")

    monkeypatch.setattr(near.cell, "fire_and_forget", ended)
    near.carry("one", SERVER, there)
    script.sendall(b"-")
    assert script.recv(1) == b""
    script.close()


@pytest.fixture
def connector(network, tmp_path):
    applet = HubApplet(tmp_path / "hub", ["site-a", "site-b"], grace_s=1.0)
    connector = HubConnector({CLIENT: "site-a", "site-b.job": "site-b"})
    connector.engine = SimpleNamespace(get_cell=lambda: network.cell(SERVER))
    connector.set_applet(applet)
    connector.start(None)
    yield connector
    connector.stop(None)
    assert not list(tmp_path.rglob("*.key"))


def test_a_client_gets_the_kit_of_its_own_name_whatever_it_says(network, connector):
    kits = [
        json.loads(Tunnels(network.cell(c)).ask(SERVER, KIT, "site-b"))
        for c in (CLIENT, "site-b.job")
    ]
    assert [kit["site"] for kit in kits] == ["site-a", "site-b"]


@pytest.mark.parametrize("topic", [KIT, OPEN])
def test_who_is_no_client_of_the_job_gets_nothing(network, connector, topic):
    stranger = Tunnels(network.cell("site-c.job"))
    with pytest.raises(OSError, match="none of the clients"):
        stranger.ask(SERVER, topic, "one")


@pytest.mark.parametrize(("min_sites", "fails"), [(None, True), (2, True), (1, False)])
def test_a_job_ends_when_too_few_scripts_are_left(monkeypatch, min_sites, fails):
    controller, told = StarController(min_sites=min_sites), []
    monkeypatch.setattr(controller, "system_panic", lambda reason, fl_ctx: told.append(reason))
    controller.participating_clients = ["site-a", "site-b"]
    monkeypatch.setattr(controller, "_update_client_status", lambda *_, **__: None)
    for name, code in (("site-a", 0), ("site-b", 3)):
        fl_ctx, peer, request = FLContext(), FLContext(), Shareable()
        peer.set_prop(ReservedKey.IDENTITY_NAME, name, private=False)
        fl_ctx.set_peer_context(peer)
        request[Constant.MSG_KEY_EXIT_CODE] = code
        controller._process_client_done("done", request, fl_ctx)
    assert bool(told) == fails
    assert all("site-b (exit code 3)" in reason for reason in told)
