"""The hub's log: what it says, and what becomes of it where it cannot be written."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from typer.testing import CliRunner

import outergrad as og
from full_disk import longest_file, small_disk
from hub_sites import HubSite, refused, sites_of_a_hub
from outergrad.core.errors import ExchangeError
from outergrad.star import journal
from outergrad.star.authority import new_authority
from outergrad.star.folder import HubFolder
from outergrad.star.frames import Kind, MalformedError
from outergrad.star.hub import Hub
from outergrad.star.journal import Journal, TamperedError, note, verified
from outergrad.star.server import HubServer
from outergrad.star.sums import DTYPES
from outergrad.tools.commands.app import app
from stars import CPU

IDENTITY = new_authority()


def lines_of(path, identity=IDENTITY):
    return list(verified(path, identity.certificate))


def whats(path, identity=IDENTITY):
    return [line["what"] for line in lines_of(path, identity)]


class Full:
    """`os.write` of the journal on a disk that has room for so many bytes more."""

    def __init__(self, monkeypatch):
        self.room = None
        self._write = os.write
        monkeypatch.setattr(journal.os, "write", self._limited)

    def _limited(self, file, data):
        if self.room is None:
            return self._write(file, data)
        count = min(self.room, len(data))
        self.room -= count
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(file, data[:count])


# -- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 1, 100, 399])
def test_a_line_is_there_as_a_whole_or_not_at_all(tmp_path, monkeypatch, room):
    full, path = Full(monkeypatch), tmp_path / "log"
    log = Journal(path, IDENTITY)
    log.write("first")
    full.room = room
    for _ in range(3):
        log.write("lost", text="x" * 400)
        assert log.failure == "No space left on device"
        assert whats(path) == ["first"]
        assert not log.try_again() or room > 300
    full.room = None
    log.write("last")
    assert not log.failure
    (missing,) = [line for line in lines_of(path) if line["what"] == "incomplete"][-1:]
    assert missing["why"] == "No space left on device"
    assert whats(path)[-1] == "last"
    told = sum(line["lines"] for line in lines_of(path) if line["what"] == "incomplete")
    assert told == 3


def test_a_file_that_may_not_grow(tmp_path):
    """As a full disk, for every user."""
    log = Journal(tmp_path / "log", IDENTITY)
    log.write("first")
    with longest_file(os.path.getsize(tmp_path / "log") + 100):
        log.write("lost")
        assert log.failure == "File too large"
    assert log.try_again()
    assert whats(tmp_path / "log") == ["first", "incomplete"]


def test_a_disk_that_is_full(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        log, filler = Journal(disk / "log", IDENTITY), disk / "filler"
        log.write("first")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        while not log.failure:
            log.write("more")
        assert set(whats(disk / "log")) == {"first", "more"}
        filler.unlink()
        assert log.try_again()
        assert whats(disk / "log")[-1] == "incomplete"
        log.close()


# -- half a line ----------------------------------------------------------------------------------


def damaged(text, at):
    """A log whose last line is there in part, or with zeros behind it as after a loss of power."""
    return {"half": text[:at], "zeros": text[:at] + b"\0" * 40, "none": text[:1]}


@pytest.mark.parametrize("kind", ["half", "zeros", "none"])
@pytest.mark.parametrize("before", [0, 1, 400])
def test_half_a_line_is_cut_off_and_the_log_says_so(tmp_path, kind, before):
    path = tmp_path / "log"
    log = Journal(path, IDENTITY)
    for k in range(before):
        log.write("whole", k=k)
    whole = path.read_bytes()
    log.write("cut", text="x" * 1000)
    last = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + damaged(last, 700)[kind])
    with pytest.raises(TamperedError, match="is not whole"):
        lines_of(path)
    again = Journal(path, IDENTITY)
    again.write("next")
    assert whats(path) == ["whole"] * before + ["recovered", "next"]
    assert lines_of(path)[before]["cut_bytes"] == len(damaged(last, 700)[kind])


def test_a_whole_line_that_is_none_is_not_cut_off(tmp_path):
    """Somebody has changed it: that is not mended silently."""
    (tmp_path / "log").write_text("what?\n")
    with pytest.raises(TamperedError, match="move the log away"):
        Journal(tmp_path / "log", IDENTITY)


def test_several_may_write_one_log(tmp_path):
    """A hub that runs, and whoever invites a site meanwhile."""

    def writes(name):
        log = Journal(tmp_path / "log", IDENTITY)
        for _ in range(50):
            log.write(name)
        log.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(writes, "abc"))
    assert sorted(whats(tmp_path / "log")) == ["a"] * 50 + ["b"] * 50 + ["c"] * 50


# -- a hub without a log --------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    for name in "ab":
        made.invite(name).write(tmp_path / f"{name}.kit")
    server = HubServer(made, "127.0.0.1:0")
    server.start()
    yield made, server, tmp_path
    server.stop()


def opened(server, folder, timeout_s=10):
    address = f"127.0.0.1:{server.port}"
    stars = [og.Star(address, kit=folder / f"{name}.kit", wait_s=10) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        timeout = timedelta(seconds=timeout_s)
        return stars, list(threads.map(lambda one: one.open(CPU, timeout=timeout), stars))


def test_without_a_log_nobody_takes_part_and_all_are_told(served, monkeypatch):
    made, server, folder = served
    full = Full(monkeypatch)
    stars, comms = opened(server, folder)
    full.room = 10
    comms[0].took_part(1, 1, 1)
    comms[1].took_part(1, 1, 1)  # a line that cannot be written
    began = time.monotonic()
    for comm in comms:  # before they send: what has arrived by then may still be read
        assert comm._line.wait_for(lambda line=comm._line: line.has_failed, 3.0)
    for comm in comms:
        with pytest.raises(ExchangeError, match="cannot write its log: No space left"):
            comm.all_gather(torch.ones(1), [1, 1]).wait()
    assert time.monotonic() - began < 3
    one = og.Star(f"127.0.0.1:{server.port}", kit=folder / "a.kit", wait_s=3)
    for star in stars:
        star.close()
    with pytest.raises(RuntimeError, match="cannot write its log: No space left"):
        one.open(CPU)
    assert server._watcher.is_alive()
    full.room = None
    time.sleep(0.5)
    again, comms = opened(server, folder)
    told = made.log_file, made.identity("hub")
    assert "incomplete" in whats(*told)
    made.revoke("b")  # the thread that looks after the lines is still there
    assert comms[1]._line.wait_for(lambda: comms[1]._line.has_failed, 3.0)
    for star in again:
        star.close()


def test_a_hub_does_not_start_without_a_log(tmp_path, monkeypatch):
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    made.invite("a")
    full = Full(monkeypatch)
    full.room = 5
    with pytest.raises(OSError, match=r"log.jsonl: cannot be written: No space left"):
        HubServer(made, "127.0.0.1:0")
    with pytest.raises(OSError, match="cannot be written"):
        made.invite("b")
    assert [site.name for site in made.sites()] == ["a"]
    with pytest.raises(OSError, match="cannot be written"):
        made.revoke("a")
    assert made.site("a") is None  # it is revoked all the same


def test_the_thread_that_looks_after_lines_outlives_what_it_meets(served, monkeypatch):
    """Whatever it is, as a list of sites that cannot be read: nobody takes part meanwhile."""
    made, server, folder = served
    _, comms = opened(server, folder)
    sites = made.path / "sites.json"
    text = sites.read_text()
    sites.write_text("{")
    for comm in comms:
        assert comm._line.wait_for(lambda comm=comm: comm._line.has_failed, 3.0)
        assert "the hub cannot go on" in str(comm._line.failure)
    sites.write_text(text)
    again, comms = opened(server, folder)
    made.revoke("b")
    assert comms[1]._line.wait_for(lambda: comms[1]._line.has_failed, 3.0)
    for star in again:
        star.close()


# -- what it says ---------------------------------------------------------------------------------


def test_invitations_starts_and_addresses_are_in_the_log(served):
    made, server, folder = served
    stars, _ = opened(server, folder)
    made.revoke("b")
    lines = lines_of(made.log_file, made.identity("hub"))
    told = [(line["what"], line.get("site")) for line in lines]
    assert told[:3] == [("invited", "a"), ("invited", "b"), ("started", None)]
    assert ("revoked", "b") in told
    assert lines[2]["sites"] == ["a", "b"]
    joined = [line["peer"] for line in lines if line["what"] == "joined"]
    assert len(joined) == 2
    assert all("127.0.0.1" in peer for peer in joined)
    for star in stars:
        star.close()


def test_runs_of_different_starts_are_told_apart(tmp_path):
    made = HubFolder(tmp_path / "hub")
    made.create("localhost:1", ["127.0.0.1"])
    for _ in range(2):
        note(made.log_file, made.identity("hub"), "started")
        about = {"run": 1, "session": 5, "first": 1, "step": 200, "sites": ["a", "b"]}
        note(made.log_file, made.identity("hub"), "step", **about)
    told = CliRunner().invoke(app, ["hub", "verify", "--folder", str(made.path)]).stdout
    lines = told.splitlines()
    assert [line for line in lines if line.startswith("run")] == ["run 1: a, b: 200 steps"] * 2
    assert sum(line.startswith("hub started 20") for line in lines) == 2


# -- what sites say of their steps ----------------------------------------------------------------


def part(site, first, last, session=7):
    site.send(Kind.PART, f"{session} {first} {last}".encode())


def steps_of(told):
    return [(f["first"], f["step"], f.get("told by")) for f in told.of("step")]


@pytest.mark.parametrize(
    "text", ["7 1 1000000", "7 2 1", "7 -1 1", "7 1", "a b c", "7 1 " + "9" * 99]
)
def test_steps_that_cannot_be_are_refused(text):
    (one, *_), _ = sites_of_a_hub(3)
    with refused(one):
        one.send(Kind.PART, text.encode())


def test_what_one_site_says_alone_is_logged_as_its_word_and_is_bounded():
    (a, b, c), told = sites_of_a_hub(3)
    for site in (a, b, c):
        part(site, 1, 16)
    for site in (a, b):
        with site.hub._lock:
            site.hub._lose(site.run, site.member, "it is lost")
    for k in range(1, 100):
        part(c, 16 * k + 1, 16 * k + 16)
    steps = steps_of(told)
    assert steps[0] == (1, 16, None)
    assert all(by == ["c"] for *_, by in steps[1:])
    assert sum(last - first + 1 for first, last, by in steps if by) <= 64
    (line,) = told.of("unconfirmed")
    assert (line["by"], line["silent"]) == (["c"], ["a", "b"])


def test_one_site_cannot_push_out_what_others_say():
    (a, b, c), told = sites_of_a_hub(3)
    part(a, 1, 1)
    part(b, 1, 1)
    for k in range(2000):
        part(c, 100 + k, 100 + k)
    part(c, 1, 1)
    assert steps_of(told) == [(1, 1, None)]
    assert [line["by"] for line in told.of("unconfirmed")] == [["c"]]


def test_who_sends_a_sum_of_another_length_is_named():
    sites, told = sites_of_a_hub(3)
    kind = DTYPES.index("float32")
    for site, count in zip(sites, (4, 2, 4), strict=True):
        numbers = {"total": 4 * count, "dtype": kind, "number": 1}
        site.send(Kind.SUM, bytes(4 * count), **numbers)
    (line,) = told.of("fault")
    assert line["sites"] == ["b"]
    assert "b sent 8 bytes of float32, where the others sent 16" in line["why"]
    faults = [frame for frame in sites[0].hear() if frame.kind == Kind.FAULT]
    assert [frame.sender for frame in faults] == [1]


@pytest.mark.parametrize("wrong", [{"dtype": 99}, {"dtype": 3}])
def test_who_sends_what_is_no_number_is_refused_not_who_comes_last(wrong):
    (a, b, c), told = sites_of_a_hub(3)
    with refused(b, "cannot be added up"):
        b.send(Kind.SUM, bytes(4), **{"total": 4, "number": 1, **wrong})
    for site in (a, c):
        site.send(Kind.SUM, bytes(4), total=4, number=1, dtype=2)
    assert [line["site"] for line in told.of("refused")] == ["b"]


# -- what is kept for others ----------------------------------------------------------------------


def flood(site, text, name=lambda k: f"end/{k}", most=3000):
    """How many texts a site can leave until it is refused."""
    for k in range(most):
        try:
            site.text(name(k), text)
        except MalformedError:
            return k
    return most


@pytest.mark.parametrize("name", [lambda k: "end/1", lambda k: f"end/{k}"], ids=["one", "many"])
def test_texts_that_a_site_does_not_read_are_bounded(name):
    """A thousand cost the hub 32 MB."""
    (a, b, c), _ = sites_of_a_hub(3)
    assert flood(c, "x" * 32_000, name) < 300
    kept = sum(len(kept.frame.payload) for kept in a.member.pipe._unsent)
    assert kept < 9 << 20
    a.text("end/1", "fine")  # others go on
    assert b.texts[0, "end/1"] == "fine"


def test_texts_that_others_keep_are_bounded():
    """Of one that reads, too: it keeps them."""
    (a, b, c), _ = sites_of_a_hub(3)
    size = 0
    for k in range(3000):
        try:
            c.text(f"end/{k}", "x" * 32_000)
        except MalformedError:
            break
        a.hear()
        b.hear()
        size += 32_000
    assert size < 9 << 20


def test_a_site_that_reads_may_leave_many_texts():
    """As one that has thousands of sessions, one after another."""
    (a, b, _), told = sites_of_a_hub(3)
    for k in range(5000):
        b.text(f"end/{k % 2000}", json.dumps({"made": k}).ljust(400))
        if k % 100 == 0:
            for site in (a, _):
                site.hear()
    assert not told.of("refused")


def test_a_board_that_one_site_fills_has_room_for_the_others(monkeypatch):
    from outergrad.star import slots

    monkeypatch.setattr(slots, "MOST_BYTES", 30_000)
    (a, b, c), _ = sites_of_a_hub(3)
    for k in range(20):
        c.ask(Kind.PUT, f"step 1 2/2/{k + 1}/0", bytes(1000))
    assert c.ask(Kind.PUT, "step 1 2/2/99/0", bytes(1000)) == b""
    assert a.first("word 0", "fine") == "fine"
    assert c.first("word 2", "fine") == "fine"
    b.put("step 1 1", bytes(2000))
    assert a.get("step 1 1") == bytes(2000)
    with refused(c, "more texts for the board"):
        for k in range(100):
            c.first(f"anything {k}", "x" * 500)


def test_hub_without_a_run_has_nothing_to_end():
    hub = Hub("ab")
    hub.end_all("for no reason")
    one = HubSite(hub, "a")
    hub.end_all("the disk is full")
    assert (one.stream.refusal, one.member.stream) == ("the disk is full", None)
