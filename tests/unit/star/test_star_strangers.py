"""Who is not let in, and what is not listened to: it is noted, and nobody else notices."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc
import pytest
import torch

import outergrad as og
from outergrad.star.authority import Identity, new_authority, new_site, read_kit
from outergrad.star.backend import registration
from outergrad.star.folder import HubFolder
from outergrad.star.frames import (
    MOST_BYTES,
    MOST_MESSAGE_BYTES,
    Frame,
    Hello,
    Kind,
    MalformedError,
    Welcome,
    unpacked,
)
from outergrad.star.hub import Hub, RefusedError
from outergrad.star.journal import verified
from outergrad.star.server import METHOD, SERVICE, HubServer
from stars import CPU, NAMES, Proxy, folder, hub, kit_of, star


@pytest.fixture
def alone(tmp_path):
    """A folder of its own, with one site, and a hub; with what the log says."""
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    made.invite("a").write(tmp_path / "a.kit")
    made.invite("b").write(tmp_path / "b.kit")
    server = HubServer(made, "127.0.0.1:0", ["a"])
    server.start()
    yield made, server
    server.stop()


def by_sessions(server, kit, wait_s=3.0):
    """Opens a star with a kit; raises what the site is told."""
    one = og.Star(f"127.0.0.1:{server.port}", kit=kit, wait_s=wait_s)
    try:
        return one.open(CPU, timeout=None)
    finally:
        one.close()


def by_the_backend(server, kit, wait_s=3.0):
    """Begins a process group with a kit, as torch does."""
    meeting = registration._meeting(f"star://{kit}?hub=127.0.0.1:{server.port}&wait_s={wait_s}")
    store, _, _ = next(meeting)
    store.set("it", "is in")
    registration._Begun.store().held.star.close()


@pytest.fixture(params=[by_sessions, by_the_backend])
def comes_in(request):
    """Each entrance to a run."""
    return request.param


def written(kit, path):
    kit.write(path)
    return path


def log_of(made):
    return list(verified(made.log_file, made.certificate_file.read_text()))


def refusals(made):
    return [line["why"] for line in log_of(made) if line["what"] == "refused"]


def test_a_site_that_was_revoked(alone, tmp_path, comes_in):
    made, server = alone
    comes_in(server, tmp_path / "a.kit")
    made.revoke("a")
    with pytest.raises(RuntimeError, match="'a' was revoked"):
        comes_in(server, tmp_path / "a.kit")
    assert refusals(made) == ["'a' was revoked"]


def test_a_site_that_is_revoked_while_it_is_there(alone, tmp_path):
    made, server = alone
    one = og.Star(f"127.0.0.1:{server.port}", kit=tmp_path / "a.kit")
    comm = one.open(CPU)
    made.revoke("a")
    began = time.monotonic()
    assert comm._line.wait_for(lambda: comm._line.has_failed, 2.0)
    assert time.monotonic() - began < 1.0
    one.close()


def test_a_kit_that_a_later_one_has_replaced(alone, tmp_path, comes_in):
    made, server = alone
    made.invite("a").write(tmp_path / "a2.kit")
    with pytest.raises(RuntimeError, match="a kit that a later one has replaced"):
        comes_in(server, tmp_path / "a.kit")
    comes_in(server, tmp_path / "a2.kit")


def test_a_site_that_takes_no_part_in_this_run(alone, tmp_path, comes_in):
    _, server = alone
    with pytest.raises(RuntimeError, match="'b' is not among the sites for which this hub"):
        comes_in(server, tmp_path / "b.kit")


def test_who_has_another_authority_expired_or_no_certificate(alone, tmp_path, comes_in):
    """TLS ends these connections before a byte of theirs is read."""
    made, server = alone
    kit, other = read_kit(tmp_path / "a.kit"), new_authority()
    foreign, late = new_site(other, "a"), new_site(made.identity("authority"), "a", days=-1)
    why = {"0.5": "does not answer", "10": "the certificate in the kit has expired"}
    for (wait_s, told), identity in zip(why.items(), (foreign, late), strict=True):
        forged = replace(kit, key=identity.key, certificate=identity.certificate)
        path = written(forged, tmp_path / f"{wait_s}.kit")
        with pytest.raises(RuntimeError, match=told):
            comes_in(server, path, wait_s=float(wait_s))
    credentials = grpc.ssl_channel_credentials(kit.authority.encode())
    assert answer(server, credentials, Hello("x").frame().packed()) == grpc.StatusCode.UNAVAILABLE
    insecure = grpc.insecure_channel(f"127.0.0.1:{server.port}")
    with insecure, pytest.raises(grpc.RpcError):
        next(insecure.stream_stream(f"/{SERVICE}/{METHOD}")(iter([b""])))
    comes_in(server, tmp_path / "a.kit")
    told = [line["what"] for line in log_of(made)]
    assert told[told.index("started") + 1 :][:2] == ["joined", "began"]


def test_a_hub_that_is_another_one(alone, tmp_path, comes_in):
    """A site's own certificate does not make a hub, nor does that of another star."""
    made, server = alone
    forged = replace(read_kit(tmp_path / "a.kit"), authority=new_authority().certificate)
    with pytest.raises(RuntimeError, match="is not the hub of this kit"):
        comes_in(server, written(forged, tmp_path / "c.kit"), wait_s=10)
    site = read_kit(tmp_path / "b.kit")
    fake = FakeHub(made, Identity(site.key, site.certificate))
    with pytest.raises(RuntimeError, match="is not the hub of this kit"):
        comes_in(fake, tmp_path / "a.kit", wait_s=10)
    fake.server.stop()


class FakeHub:
    """With a site's certificate, at the hub's address."""

    def __init__(self, made, identity):
        class Folder(HubFolder):
            def identity(self, of):
                return identity if of == "hub" else super().identity(of)

            @property
            def log_file(self):
                return self.path / "fake.jsonl"

        self.server = HubServer(Folder(made.path), "127.0.0.1:0", ["a"])
        self.server.start()
        self.port = self.server.port


def test_a_kit_that_others_may_read_or_that_is_none(tmp_path):
    path = written(read_kit(kit_of(NAMES[0], folder())), tmp_path / "a.kit")
    os.chmod(path, 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        read_kit(path)
    (tmp_path / "b.kit").write_text("{}")
    os.chmod(tmp_path / "b.kit", 0o600)
    with pytest.raises(ValueError, match="is no kit"):
        read_kit(tmp_path / "b.kit")
    with pytest.raises(ValueError, match="No such file"):
        read_kit(tmp_path / "c.kit")
    with pytest.raises(ValueError, match="needs kit="):
        og.Star("localhost:1").open(CPU)


def credentials_of(name):
    kit = read_kit(kit_of(name, folder()))
    pair = kit.key.encode(), kit.certificate.encode()
    return grpc.ssl_channel_credentials(kit.authority.encode(), *pair)


def answer(server, credentials, *messages, late=None):
    """How a stream ends on which these messages are sent; `late` makes them one by one."""
    address, path = f"127.0.0.1:{server.port}", f"/{SERVICE}/{METHOD}"
    with grpc.secure_channel(address, credentials) as channel:
        try:
            list(channel.stream_stream(path)(late or iter(messages), timeout=5))
        except grpc.RpcError as error:
            return error.code()
    return None


def damaged(draw, whole):
    """A message that is not as it should be, in one of many ways."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return whole[: draw.randrange(1, len(whole))]
    if kind == 2:
        at = draw.randrange(len(whole))
        return whole[:at] + bytes([whole[at] ^ draw.randrange(1, 256)]) + whole[at + 1 :]
    numbers = {name: draw.choice([0, 1, 2, 3, 9, 255]) for name in ("lane", "dtype")}
    numbers |= {
        name: draw.choice([0, 1, 2, 1 << 15, (1 << 64) - 1])
        for name in ("run", "sequence", "number", "offset", "total")
    }
    numbers |= {name: draw.choice([0, 1, 2, 0xFFFF]) for name in ("sender", "recipient")}
    payload = draw.randbytes(draw.choice([0, 1, 64]))
    return Frame(draw.choice(list(Kind)), payload, **numbers).packed()


def entered(a_hub, name, instance="x"):
    run, member, stream = a_hub.enter(name, Hello(instance))
    messages = a_hub.messages(run, member, stream)
    assert Welcome.of(unpacked(next(messages))[0]).names == ["a", "b", "c"]
    return run, member, stream


@pytest.mark.parametrize("seed", range(300))
def test_whatever_one_site_sends_the_others_go_on(seed):
    """The hub itself, without a network: a site that sends anything at all harms itself alone."""
    draw, refused = random.Random(seed), 0
    told = []
    a_hub = Hub(["a", "b", "c"], lambda what, **facts: told.append((what, facts)))
    lines = {name: entered(a_hub, name) for name in ("a", "b", "c")}
    run, bad, stream = lines["c"]
    usual = Frame(Kind.GATHER, b"12345678", run=1, sequence=1, number=1, sender=2, total=8)
    for _ in range(20):
        try:
            a_hub.take(run, bad, stream, damaged(draw, usual.packed()))
        except MalformedError as error:
            refused += 1
            a_hub.leave(run, bad, stream, str(error))
            try:
                lines["c"] = run, bad, stream = a_hub.enter("c", Hello("x"))
            except (RefusedError, MalformedError):
                break
    assert refused
    assert [facts["site"] for what, facts in told if what == "refused"] == ["c"] * refused
    for rank, name in enumerate("ab"):
        run, member, stream = lines[name]
        mine = usual._replace(sender=rank, sequence=1, number=5, lane=3)
        a_hub.take(run, member, stream, mine.packed())
    for other, name in ((1, "a"), (0, "b")):
        frames = lines[name][1].pipe.batch(1 << 20)
        assert (Kind.GATHER, other, 3) in {(f.kind, f.sender, f.lane) for f in frames}


WRONG = {
    "another's name": ({"sender": 0}, "under the name of 'a'"),
    "a sum that is none": ({"kind": Kind.SUM, "dtype": 99}, "cannot be added up"),
    "another run": ({"run": 7}, "of run 7"),
    "a frame is missing": ({"sequence": 3}, "frame 3 came behind 0"),
    "what only a hub says": ({"kind": Kind.READY}, "of kind READY"),
    "for nobody": ({"kind": Kind.EACH, "recipient": 9}, "for rank 9"),
    "for itself": ({"kind": Kind.EACH, "recipient": 2}, "for 'c'"),
    "no bytes": ({"payload": b""}, "without bytes"),
    "beyond its end": ({"offset": 5}, "says what cannot be"),
    "longer than its message": ({"total": 7}, "says what cannot be"),
    "a letter longer than it says": (
        {"kind": Kind.LETTER, "recipient": 0, "total": 0},
        "says what cannot be",
    ),
    "a lane that is none": ({"lane": 8}, "which no group has"),
    "a sum for nobody": ({"kind": Kind.SUM, "dtype": 2, "recipient": 9}, "for rank 9"),
    "a sum of an operation that is none": ({"kind": Kind.SUM, "dtype": 0xF2}, "cannot be added"),
    "bits of fractions": ({"kind": Kind.SUM, "dtype": 0x52}, "cannot be added up"),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_a_frame_that_is_wrong_is_refused_by_name(change, told):
    a_hub = Hub(["a", "b", "c"])
    lines = {name: entered(a_hub, name) for name in ("a", "b", "c")}
    usual = Frame(Kind.GATHER, b"12345678", run=1, sequence=1, number=1, sender=2, total=8)
    with pytest.raises(MalformedError, match=told):
        a_hub.take(*lines["c"], usual._replace(**change).packed())


def test_a_frame_that_comes_again_is_not_heard_again():
    a_hub = Hub(["a", "b", "c"])
    lines = {name: entered(a_hub, name) for name in ("a", "b", "c")}
    usual = Frame(Kind.GATHER, b"12345678", run=1, sequence=1, number=1, sender=2, total=8)
    for _ in range(3):
        a_hub.take(*lines["c"], usual.packed())
    frames = lines["a"][1].pipe.batch(1 << 20)
    assert [frame.kind for frame in frames] == [Kind.READY, Kind.GATHER]


def test_a_site_cannot_fill_the_memory_of_the_hub():
    a_hub = Hub(["a", "b", "c"])
    lines = {name: entered(a_hub, name) for name in ("a", "b", "c")}
    usual = Frame(Kind.GATHER, bytes(MOST_BYTES), run=1, number=1, sender=2, total=1 << 40)
    parts = [usual._replace(sequence=k + 1, offset=k * MOST_BYTES) for k in range(9)]
    for part in parts[:8]:
        a_hub.take(*lines["c"], part.packed())
    with pytest.raises(MalformedError, match="more than a window"):
        a_hub.take(*lines["c"], parts[8].packed())


def test_a_stranger_on_the_network_disturbs_nobody():
    """Malformed and oversized messages with a valid certificate, while two others go on."""
    with hub(3) as server:
        sites = [star(server, rank) for rank in range(2)]
        bad = credentials_of(NAMES[2])
        hello = Hello("x").frame().packed()
        assert answer(server, bad, b"what?") == grpc.StatusCode.PERMISSION_DENIED
        assert answer(server, bad, hello, b"what?") == grpc.StatusCode.PERMISSION_DENIED
        too_long = bytes(MOST_MESSAGE_BYTES + 1)
        ended = answer(server, bad, hello, too_long)
        assert ended in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
        third = star(server, 2)
        comms = both_open([*sites, third])
        for _ in range(3):
            answer(server, credentials_of(NAMES[3]), hello)
            works = [comm.all_gather(torch.ones(2), [2] * 3) for comm in comms]
            assert all(torch.stack(work.wait()).sum() == 6 for work in works)
        for one in (*sites, third):
            one.close()


def both_open(stars):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(stars)) as threads:
        return list(threads.map(lambda one: one.open(CPU), stars))


def test_paths_may_be_text(alone, tmp_path, comes_in):
    _, server = alone
    comes_in(server, str(Path(tmp_path / "a.kit")))


def replaced(made):
    made.invite("a")


def revoked(made):
    made.revoke("a")


KIT_ENDS = {"revoked": revoked, "replaced": replaced}


@pytest.mark.parametrize("end", KIT_ENDS.values(), ids=KIT_ENDS)
def test_a_kit_that_ends_ends_its_open_line(alone, tmp_path, end):
    """What its site sends then reaches nobody."""
    made, server = alone
    one = og.Star(f"127.0.0.1:{server.port}", kit=tmp_path / "a.kit")
    comm = one.open(CPU)
    end(made)
    assert comm._line.wait_for(lambda: comm._line.has_failed, 2.0)
    one.close()
    assert [line["what"] for line in log_of(made)][-1] == "lost"


def test_a_kit_that_expires_ends_its_open_line(alone, tmp_path, monkeypatch):
    made, server = alone
    one = og.Star(f"127.0.0.1:{server.port}", kit=tmp_path / "a.kit")
    comm = one.open(CPU)
    later = datetime.now(timezone.utc) + timedelta(days=366)
    monkeypatch.setattr("outergrad.star.server.now", lambda: later)
    assert comm._line.wait_for(lambda: comm._line.has_failed, 2.0)
    one.close()
    assert "expired" in log_of(made)[-1]["why"]


@pytest.mark.parametrize("end", KIT_ENDS.values(), ids=KIT_ENDS)
def test_a_line_that_was_opened_before_its_kit_ended_is_not_greeted_after(alone, tmp_path, end):
    made, server = alone
    kit = read_kit(tmp_path / "a.kit")
    credentials = grpc.ssl_channel_credentials(
        kit.authority.encode(), kit.key.encode(), kit.certificate.encode()
    )

    def late():
        server_has_the_stream(server)
        end(made)
        yield Hello("x").frame().packed()

    assert answer(server, credentials, late=late()) == grpc.StatusCode.PERMISSION_DENIED
    told = {line["what"] for line in log_of(made)}
    assert "refused" in told
    assert not told & {"joined", "began"}


GREETINGS = {
    "long": ({"sites": ["a"] * 40000}, "a greeting of"),
    "a huge name": ({"after": 1, "sites": ["a" * 5000]}, "names that no site has"),
    "no name": ({"after": 1, "sites": [""]}, "names that no site has"),
    "a name that steers": ({"after": 1, "sites": ["\x1b[31m"]}, "names that no site has"),
    "a name twice": ({"after": 1, "sites": ["a", "a"]}, "names a site twice"),
    "a huge number": ({"heard": 1 << 70}, "numbers out of range"),
    "a number that is none": ({"heard": True}, "numbers out of range"),
    "a long instance": ({"instance": "x" * 65}, "does not begin with a greeting"),
}


@pytest.mark.parametrize(("change", "told"), GREETINGS.values(), ids=GREETINGS)
def test_a_greeting_that_is_huge_or_strange(change, told):
    with pytest.raises(MalformedError, match=told):
        Hello.of(replace(Hello("x"), **change).frame())


def server_has_the_stream(server):
    """Waits until the hub has taken the certificate of a stream for good."""
    wait_until(lambda: any(server._open.values()))


def wait_until(what, at_most_s=5.0):
    end = time.monotonic() + at_most_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_member_that_is_away_and_revoked_is_lost_before_its_grace_is_over(alone, tmp_path):
    made, _ = alone
    patient = HubServer(made, "127.0.0.1:0", ["a", "b"], grace_s=60.0)
    patient.start()
    through = Proxy(patient.port)
    a = og.Star(f"127.0.0.1:{through.port}", kit=tmp_path / "a.kit")
    b = og.Star(f"127.0.0.1:{patient.port}", kit=tmp_path / "b.kit")
    try:
        _, comm = both_open([a, b])
        through.close()
        wait_until(lambda: "away" in [line["what"] for line in log_of(made)])
        made.revoke("a")
        wait_until(lambda: comm._line.gone)
        assert "revoked" in comm._line.gone[0]
    finally:
        patient.stop()
        a.close()
        b.close()
