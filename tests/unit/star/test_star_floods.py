"""Connections that say nothing, or too often the same: they end, and shut nobody out."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
import time

import grpc
import pytest

import outergrad as og
from outergrad.star.authority import read_kit
from outergrad.star.connections import Connections, Pace, Peer
from outergrad.star.folder import HubFolder
from outergrad.star.frames import Hello
from outergrad.star.journal import Repeats, verified
from outergrad.star.server import METHOD, SERVICE, HubServer
from stars import CPU

STRANGER = "127.0.0.2"


@pytest.fixture
def impatient(tmp_path, monkeypatch):
    """A hub that waits for half a second for a greeting, and its folder, with two sites."""
    monkeypatch.setattr("outergrad.star.server.GREETING_S", 0.5)
    monkeypatch.setattr("outergrad.star.connections.GREETING_S", 0.5)
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    for name in ("a", "b"):
        made.invite(name).write(tmp_path / f"{name}.kit")
    server = HubServer(made, "127.0.0.1:0", ["a"])
    server._connections._patience_s = 0.5
    server.start()
    yield made, server
    server.stop()


def connected(server, source=STRANGER):
    one = socket.socket()
    one.bind((source, 0))
    one.settimeout(5.0)
    one.connect(("127.0.0.1", server.port))
    return one


def encrypted(server, kit):
    """After the TLS handshake, by a kit's certificate."""
    context = ssl.create_default_context(cadata=kit.authority)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with contextlib.ExitStack() as stack:
        import tempfile

        file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
        file.write(kit.certificate + kit.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context.wrap_socket(connected(server))


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def silent(server, kit):
    return connected(server)


def half_a_hello_of_tls(server, kit):
    one = connected(server)
    one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    return one


def silent_after_tls(server, kit):
    return encrypted(server, kit)


def silent_after_the_preface(server, kit):
    one = encrypted(server, kit)
    one.sendall(PREFACE + SETTINGS)
    return one


def silent_within_headers(server, kit):
    one = encrypted(server, kit)
    one.sendall(PREFACE + SETTINGS + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01" + b"\x82")
    return one


PHASES = [
    silent,
    half_a_hello_of_tls,
    silent_after_tls,
    silent_after_the_preface,
    silent_within_headers,
]


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "a byte at a time"])
def test_who_does_not_greet_is_shut_in_every_phase(impatient, tmp_path, phase, trickles):
    _, server = impatient
    one = phase(server, read_kit(tmp_path / "a.kit"))
    began = time.monotonic()
    while time.monotonic() - began < 4.0:
        with contextlib.suppress(TimeoutError):
            one.settimeout(0.05)
            try:
                if trickles:
                    one.sendall(b"\x00")
                if not one.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - began < 2.0
    one.close()


def stream_of(server, kit, messages):
    """A stream by a kit, and its channel."""
    credentials = grpc.ssl_channel_credentials(
        kit.authority.encode(), kit.key.encode(), kit.certificate.encode()
    )
    channel = grpc.secure_channel(f"127.0.0.1:{server.port}", credentials)
    return channel, channel.stream_stream(f"/{SERVICE}/{METHOD}")(messages)


def test_a_stream_that_does_not_greet_is_ended_beside_one_that_did(impatient, tmp_path):
    _, server = impatient
    kit, hold = read_kit(tmp_path / "a.kit"), threading.Event()

    def greets():
        yield Hello("x").frame().packed()
        hold.wait(10.0)

    def says_nothing():
        hold.wait(10.0)
        yield b""

    channel, good = stream_of(server, kit, greets())
    next(good)
    bad = channel.stream_stream(f"/{SERVICE}/{METHOD}")(says_nothing())
    with pytest.raises(grpc.RpcError):
        next(bad)
    time.sleep(0.5)
    assert good.is_active()
    hold.set()
    channel.close()


def test_a_site_that_trains_in_silence_is_let_be(impatient, tmp_path):
    _, server = impatient
    one = og.Star(f"127.0.0.1:{server.port}", kit=tmp_path / "a.kit")
    comm = one.open(CPU)
    time.sleep(1.5)
    assert not comm._line.has_failed
    told = [line["what"] for line in log_of(impatient[0])]
    assert "joined" in told
    assert not {"left", "lost", "refused"} & {*told}
    one.close()


def log_of(made):
    return list(verified(made.log_file, made.certificate_file.read_text()))


def test_connections_of_one_address_are_bounded_and_the_oldest_go_first(impatient):
    made, server = impatient
    server._connections._patience_s = 60.0
    first = connected(server)
    time.sleep(0.3)
    more = [connected(server) for _ in range(server._connections._per_address)]
    assert first.recv(1) == b""
    time.sleep(0.3)
    for one in more:
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.recv(1)
    shut = next(line for line in log_of(made) if line["what"] == "refused")
    assert "of its address" in shut["why"]
    assert shut["host"] == STRANGER
    for one in [first, *more]:
        one.close()


def test_connections_of_all_addresses_are_bounded(impatient):
    _, server = impatient
    server._connections._patience_s, server._connections._in_all = 60.0, 8
    many = [connected(server, f"127.0.1.{k}") for k in range(1, 21)]
    time.sleep(0.5)
    closed = [one for one in many if is_closed(one)]
    assert len(closed) == 12
    for one in many:
        one.close()


def is_closed(one):
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


FLOODED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer
server = HubServer(HubFolder(Path(sys.argv[1])), "127.0.0.1:0", ["a"])
server.start()
print(server.port, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.mark.slow
def test_more_silent_connections_than_files_shut_no_site_out(tmp_path):
    """The hub may have 128 files; 200 connections come, again and again, and a site dials."""
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    made.invite("a").write(tmp_path / "a.kit")
    command = [sys.executable, "-c", FLOODED, str(made.path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            flood = Flood(port, 200)
            time.sleep(1.0)
            began = time.monotonic()
            one = og.Star(f"127.0.0.1:{port}", kit=tmp_path / "a.kit", wait_s=15.0)
            comm = one.open(CPU)
            took_s = time.monotonic() - began
            time.sleep(1.0)
            assert not comm._line.has_failed
            one.close()
            flood.end()
        finally:
            process.stdin.close()
            process.wait(20)
    assert took_s < 10.0
    assert flood.opened >= 200
    log = log_of(made)
    assert "lost" not in {line["what"] for line in log}
    refused = [line for line in log if line["what"] == "refused"]
    assert len(refused) < 20
    assert sum(line.get("times", 1) for line in refused) > 60


class Flood:
    """Keeps some connections to a port open that say nothing; at most a thousand in all."""

    def __init__(self, port, count):
        self._port, self._count, self._over = port, count, threading.Event()
        self.opened, self._open = 0, []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.is_set() and self.opened < 1000:
            for one in [one for one in self._open if is_closed(one)]:
                one.close()
                self._open.remove(one)
            for _ in range(self._count - len(self._open)):
                one = socket.socket()
                one.bind((STRANGER, 0))
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", self._port))
                self._open.append(one)
                self.opened += 1
            self._over.wait(0.2)

    def end(self):
        self._over.set()
        self._thread.join()
        for one in self._open:
            one.close()


def test_a_revoked_kit_that_comes_again_and_again_is_counted(impatient, tmp_path):
    made, server = impatient
    made.revoke("a")
    kit = read_kit(tmp_path / "a.kit")
    for _ in range(40):
        channel, stream = stream_of(server, kit, iter([Hello("x").frame().packed()]))
        with channel, pytest.raises(grpc.RpcError):
            next(stream)
    server._repeats.flush(everything=True)
    told = [line for line in log_of(made) if line["what"] == "refused"]
    assert len(told) <= 8
    about = [line for line in told if "revoked" in line["why"]]
    assert sum(line.get("times", 1) for line in about) == 40


def test_what_is_counted_and_what_is_not():
    told = []
    repeats = Repeats(lambda what, **facts: told.append((what, facts)), at_first=2)
    for number in range(10):
        repeats.write("away", site="a", run=number)
        repeats.write("step", site="a", run=number)
    assert [what for what, _ in told].count("step") == 10
    assert [what for what, _ in told].count("away") == 2
    repeats.flush()
    assert len(told) == 12
    repeats.flush(everything=True)
    what, facts = told[-1]
    assert (what, facts["site"], facts["run"], facts["times"]) == ("away", "a", 9, 8)
    repeats.write("away", site="a")
    assert told[-1] == ("away", {"site": "a"})


def test_many_addresses_do_not_make_many_lines_nor_hide_a_site():
    told = []
    repeats = Repeats(lambda what, **facts: told.append((what, facts)))
    for number in range(5000):
        repeats.write("refused", host=f"h{number}", why="x")
    for _ in range(3):
        repeats.write("away", site="a")
    assert [what for what, _ in told].count("away") == 3
    repeats.flush(everything=True)
    assert len(told) < 300
    assert sum(facts.get("times", 1) for what, facts in told if what == "refused") == 5000


def test_addresses_of_one_network_are_one():
    told = []
    some = Connections(lambda host, why: told.append(host), 3, 100)
    sixth = {Peer(f"2001:db8::{k}", k): None for k in range(1, 6)}
    shut = list(some._to_shut(sixth, 0.0))
    assert [peer.port for peer, _ in shut] == [1, 2]
    with some.greeted("ipv6:%5B2001:db8::3%5D:3"):
        assert Peer("2001:db8::3", 3) not in [peer for peer, _ in some._to_shut(sixth, 99.0)]
    with some.greeted("ipv6:%5B::ffff:192.0.2.1%5D:7"):
        assert not list(some._to_shut({Peer("192.0.2.1", 7): None}, 99.0))


def test_the_limit_of_files_is_raised_and_some_are_kept():
    code = """
import json, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2048))
from outergrad.star.connections import most_connections, raise_file_limit
before = most_connections()
raise_file_limit()
print(json.dumps([before, most_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [192, 1984, [2048, 2048]]


def test_a_kit_that_begins_anew_again_and_again_is_paced_and_the_others_are_not():
    pace = Pace(at_once=3, per_s=10.0)
    waits = [pace.wait_s("a", now=100.0) for _ in range(6)]
    assert waits[:3] == [0.0] * 3
    assert waits[3:] == pytest.approx([0.1, 0.2, 0.3])
    assert pace.wait_s("b", now=100.0) == 0.0
    assert pace.wait_s("a", now=200.0) == 0.0


def test_a_kit_that_greets_as_ever_new_processes_writes_few_lines(impatient, tmp_path):
    made, server = impatient
    server._pace = Pace(at_once=5, per_s=10.0)
    kit, began = read_kit(tmp_path / "a.kit"), time.monotonic()
    count = 0
    while time.monotonic() - began < 1.5:
        channel, stream = stream_of(server, kit, iter([Hello(f"p{count}").frame().packed()]))
        with channel, contextlib.suppress(grpc.RpcError):
            next(stream)
        count += 1
    assert sum(line["what"] == "joined" for line in log_of(made)) <= 5 + 20
