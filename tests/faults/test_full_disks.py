"""Disks of a hub that are full, and hubs that are killed within a line: nothing is silent."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from test_own_transport import build, train

import outergrad as og
from covering import LONG, covering
from full_disk import small_disk
from outergrad.star import journal
from outergrad.star.authority import new_authority
from outergrad.star.folder import HubFolder
from outergrad.star.journal import Journal, TamperedError, verified
from outergrad.star.server import HubServer

IDENTITY = new_authority()
LOGS, STEPS = (2000, 8) if LONG else (40, 3)
DIRECTLY = os.write


class Disk:
    """That has room for so many bytes more; without end if None."""

    def __init__(self):
        self.room = None

    def write(self, file, data):
        """As `os.write`."""
        count = len(data) if self.room is None else min(self.room, len(data))
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room = None if self.room is None else self.room - count
        return DIRECTLY(file, data[:count])


@pytest.mark.parametrize("seed", range(LOGS))
def test_a_log_is_always_whole_and_says_what_it_lacks(seed, tmp_path, monkeypatch):
    """Lines, disks that are full and free again, hubs that are killed within a line."""
    dice, disk, path = random.Random(f"disk {seed}"), Disk(), tmp_path / "log"
    monkeypatch.setattr(journal.os, "write", disk.write)
    log, written, lost = Journal(path, IDENTITY), [], 0
    for number in range(40):
        what = dice.choice(["write"] * 6 + ["full", "free", "kill", "restart"])
        if what == "write":
            log.write("line", number=number, text="x" * dice.choice([0, 10, 3000]))
            if log.failure:
                lost += 1
            else:
                written.append(number)
        elif what == "full":
            disk.room = dice.choice([0, 1, 50, 400, 2000])
        elif what == "free":
            disk.room = None
            assert log.try_again()
            assert _missing(path) == lost
        elif not log.failure:  # what a hub that is killed has not written it cannot say
            log.close()
            if what == "kill":
                with path.open("ab") as file:
                    file.write(b"{" + dice.randbytes(dice.choice([0, 5, 900])).replace(b"\n", b""))
                with pytest.raises(TamperedError, match="not whole"):
                    _lines(path)
            disk.room = None
            log = Journal(path, IDENTITY)
        found = [line["number"] for line in _lines(path) if line["what"] == "line"]
        assert found == written
    log.close()


def _lines(path):
    return list(verified(path, IDENTITY.certificate))


def _missing(path):
    return sum(line["lines"] for line in _lines(path) if line["what"] == "incomplete")


# -- sites that train -----------------------------------------------------------------------------


@contextmanager
def injected(tmp_path, monkeypatch):
    """A folder, what makes its disk full, and what makes it free."""
    disk = Disk()
    monkeypatch.setattr(journal.os, "write", disk.write)
    yield tmp_path / "disk", lambda: setattr(disk, "room", 10), lambda: setattr(disk, "room", None)


@contextmanager
def mounted(tmp_path, monkeypatch):
    with small_disk(tmp_path / "small", "256k") as folder:
        filler = folder / "filler"

        def fill():
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(64))

        yield folder / "disk", fill, filler.unlink


def trained(rank, transport, fault, at):
    """Gradients of one site, and what it raised."""
    model, found = build(), []
    try:
        session = og.distribute(model, og.DAD(always=True), transport=transport, timeout=10)
        for step, gradients in enumerate(train(model, rank)):
            found.append(gradients)
            if rank == 0 and step == at:
                fault()
        session.detach()
    except (RuntimeError, ValueError) as error:
        return found, error
    return found, None


@pytest.mark.parametrize(
    ("disk", "when_lost", "at"),
    covering([injected, mounted], ["raise", "go on"], range(STEPS), quick=3),
)
def test_sites_end_alike_and_know_why_where_the_hub_has_no_log(
    disk, when_lost, at, tmp_path, monkeypatch
):
    with disk(tmp_path, monkeypatch) as (folder, fill, free):
        made = HubFolder(folder)
        made.create("localhost:1", ["127.0.0.1"])
        names = ["a", "b", "c"]
        for name in names:
            made.invite(name).write(tmp_path / f"{name}.kit")
        server = HubServer(made, "127.0.0.1:0")
        server.start()

        def fault():
            fill()
            while not server._journal.failure:  # a few lines may go into the last page
                server._journal.write("refused", why="as in a test")
            time.sleep(0.5)  # the hub looks ten times per second

        try:
            ended = _train_all(server, tmp_path, names, when_lost, fault, at)
            _judge(ended)
            free()
            deadline = time.monotonic() + 5
            while server._journal.failure and time.monotonic() < deadline:
                time.sleep(0.05)
            again = _train_all(server, tmp_path, names, when_lost, lambda: None, at)
            assert [error for _, error in again] == [None] * 3
            assert server._watcher.is_alive()
        finally:
            server.stop()
        told = [line["what"] for line in verified(made.log_file, _certificate(made))]
        assert "incomplete" in told


def _certificate(made):
    return made.certificate_file.read_text()


def _train_all(server, folder, names, when_lost, fault, at):
    address = f"127.0.0.1:{server.port}"
    about = {"wait_s": 20, "when_lost": when_lost}
    stars = [og.Star(address, kit=folder / f"{name}.kit", **about) for name in names]
    try:
        with ThreadPoolExecutor(len(stars)) as threads:
            body = lambda rank, one: trained(rank, one, fault, at)  # noqa: E731
            return list(threads.map(body, range(len(stars)), stars))
    finally:
        ends = [threading.Thread(target=one.close) for one in stars]
        for end in ends:
            end.start()
        for end in ends:
            end.join()


def _judge(ended):
    """All raised, and said why; none is apart from another that takes it for granted."""
    for rank, (found, error) in enumerate(ended):
        assert isinstance(error, RuntimeError), (rank, error)
        for other, (theirs, _) in enumerate(ended):
            both = zip(found, theirs, strict=False)
            assert all(all(map(torch.equal, mine, its)) for mine, its in both)
            if len(found) != len(theirs):
                assert isinstance(error, og.SiteLostError)
                assert other in error.may_differ or not error.certain
    assert any("cannot write its log" in str(error) for _, error in ended)
