"""Lines that drop: who comes back in time loses nothing, and who does not is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from test_own_transport import METHODS, STEPS, build, pooled, train

import outergrad as og
from cases import relative_error
from outergrad.core.errors import ExchangeError, Failure
from stars import CPU, NAMES, Proxy, hub, kit_of, star

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def shaky(request):
    """A hub for two sites, the second behind a network that may fail."""
    settings = getattr(request, "param", {})
    with hub(2, grace_s=3.0) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0, **settings), star(server, 1, proxy.port, **settings)]
        yield stars, proxy
        for one in stars:
            one.close()
        proxy.close()


def both(body, *arguments):
    with ThreadPoolExecutor(len(arguments[0])) as threads:
        return list(threads.map(body, *arguments))


def opened(stars, timeout=TIMEOUT):
    return both(lambda one: one.open(CPU, timeout=timeout), stars)


@pytest.mark.parametrize("shaky", [{}, {"blind": True}], indirect=True, ids=["usual", "blind"])
def test_cuts_in_the_middle_of_everything_lose_nothing(shaky):
    """Long and short messages of all kinds, while the line is cut many times."""
    stars, proxy = shaky
    comms, done = opened(stars), threading.Event()

    def cut():
        while not done.wait(0.25):
            proxy.cut()

    def body(comm):
        for turn in range(30):
            size = [10, 5_000, 300_000][turn % 3]
            own = torch.full((size,), float(10 * turn + comm.rank))
            parts = comm.all_gather(own, [size] * 2)
            total = comm.all_reduce(own.clone())
            votes = comm.all_gather(comm.control([turn, comm.rank]), [2] * 2, lane=2)
            for rank, part in enumerate(parts.wait()):
                assert torch.equal(part, torch.full((size,), float(10 * turn + rank)))
            assert torch.equal(total.wait(), torch.full((size,), 20.0 * turn + 1))
            assert [vote.tolist() for vote in votes.wait()] == [[turn, 0], [turn, 1]]

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        both(body, comms)
    finally:
        done.set()
        cutter.join()


def test_a_cut_costs_no_step_of_a_training(shaky):
    stars, proxy = shaky

    def body(rank, one):
        model = build()
        session = og.distribute(model, og.DAD(always=True), transport=one)
        found = []
        for gradients in train(model, rank):
            found.append(gradients)
            if rank == 0:
                proxy.cut()
        session.detach()
        return found

    expected = pooled(2)
    for found in both(body, range(2), stars):
        assert len(found) == len(expected)
        for mine, wanted in zip(found, expected, strict=True):
            assert all(relative_error(*pair) < 1e-12 for pair in zip(mine, wanted, strict=True))


def gather(comm):
    return [part.tolist() for part in comm.all_gather(torch.ones(2), [2] * 2).wait()]


@pytest.mark.alone
def test_a_site_is_back_in_a_moment(shaky):
    stars, proxy = shaky
    comms = opened(stars)
    seconds = []
    for _ in range(3):
        both(gather, comms)
        proxy.cut()
        began = time.monotonic()
        both(gather, comms)
        seconds.append(time.monotonic() - began)
    assert sorted(seconds)[1] < 0.2


def test_a_line_that_is_down_for_a_while_is_waited_for(shaky):
    stars, proxy = shaky
    comms = opened(stars)
    proxy.is_up = False
    proxy.cut()
    threading.Timer(1.0, setattr, (proxy, "is_up", True)).start()
    assert both(gather, comms) == [[[1.0, 1.0]] * 2] * 2


def lost(comm):
    began = time.monotonic()
    with pytest.raises(ExchangeError) as caught:
        gather(comm)
    return caught.value, time.monotonic() - began


@pytest.mark.alone
def test_a_line_that_is_silent_is_seen_within_five_seconds():
    with hub(2) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0), star(server, 1, proxy.port)]
        comms = opened(stars)
        both(gather, comms)
        proxy.is_silent = True
        error, seconds = lost(comms[0])
        assert (error.kind, error.sites) == (Failure.CLOSED, (1,))
        assert 0.5 < seconds < 5.0
        proxy.is_silent = False
        proxy.cut()
        for one in stars:
            one.close()
        proxy.close()


SITE = """
import sys, torch, datetime, outergrad as og
comm = og.Star(sys.argv[1], kit=sys.argv[2]).open(torch.device("cpu"))
comm.all_gather(torch.ones(2), [2, 2]).wait()
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.alone
def test_a_site_that_is_cut_off_is_lost_within_a_second():
    with hub(2) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0), star(server, 1, proxy.port)]
        comms = opened(stars)
        both(gather, comms)
        proxy.is_up = False
        proxy.cut()
        error, seconds = lost(comms[0])
        assert (error.kind, error.sites) == (Failure.CLOSED, (1,))
        assert 0.5 < seconds < 1.0
        proxy.is_up = True
        assert "was away for longer than 0.8 s" in str(lost(comms[1])[0])
        for one in stars:
            one.close()
        proxy.close()


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_site_is_seen_within_a_second():
    with hub(2) as server:
        address = f"127.0.0.1:{server.port}"
        command = [sys.executable, "-c", SITE, address, kit_of(NAMES[1])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as process:
            one = star(server, 0)
            comm = one.open(CPU, timeout=TIMEOUT)
            gather(comm)
            process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
            error, seconds = lost(comm)
        assert (error.kind, error.sites) == (Failure.CLOSED, (1,))
        assert seconds < 1.0
        one.close()


def test_a_hub_that_is_gone_is_an_error_and_no_hang():
    with hub(1) as server:
        one = star(server, 0)
        (comm,) = opened([one], timedelta(seconds=1.0))
        server.stop()
        comm.world_size = 2  # another one is waited for
        error, seconds = lost(comm)
        assert error.kind in (Failure.TRANSPORT, Failure.TIMEOUT)
        assert seconds < 3.0
        one.close()


def test_a_restarted_hub_knows_no_run_of_before():
    with hub(2) as server:
        proxy = Proxy(server.port)
        stars = [star(server, rank, proxy.port) for rank in range(2)]
        comms = opened(stars)
        with hub(2) as other:
            proxy._to = other.port
            proxy.cut()
            for error, _ in both(lost, comms):
                assert error.kind == Failure.TRANSPORT
                assert "started anew" in str(error)
        for one in stars:
            one.close()
        proxy.close()


def copied(name, folder):
    """A kit elsewhere, as if of another process: this one would share its line."""
    return shutil.copy(kit_of(name), folder / name)


def test_a_process_that_starts_again_takes_the_place_of_the_one_before(tmp_path):
    with hub(2) as server:
        first = [star(server, rank) for rank in range(2)]
        comms = opened(first)
        again = star(server, 1, kit=copied(NAMES[1], tmp_path))
        coming = threading.Thread(target=lambda: opened([again]))
        coming.start()
        error, _ = lost(comms[0])
        assert (error.kind, error.sites) == (Failure.CLOSED, (1,))
        anew = star(server, 0, kit=copied(NAMES[0], tmp_path))
        opened([anew])
        coming.join()
        for one in (*first, again, anew):
            one.close()


@pytest.mark.parametrize("name", ["dad forced", "dense"])
def test_those_that_are_left_agree_on_the_step_and_name_who_is_lost(name):
    """The third site's line is cut, for good, in the middle of the training."""
    with hub(3, grace_s=0.4) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0), star(server, 1), star(server, 2, proxy.port)]

        def cut_off():
            proxy.is_up = False
            proxy.cut()

        def body(rank, one):
            model, found, session = build(), [], None
            try:
                session = og.distribute(model, METHODS[name], transport=one, timeout=10)
                for step, gradients in enumerate(train(model, rank)):
                    found.append(gradients)
                    if rank == 2 and step == STEPS - 3:
                        cut_off()
            except og.SiteLostError as error:
                proxy.is_up = True  # the third one may hear that it is too late
                return found, error, session
            raise AssertionError(f"site {rank} lost nobody")

        first, second, third = both(body, range(3), stars)
        for found, error, _ in (first, second):
            assert (error.sites, error.step) == ((2,), len(found))
            assert error.may_differ == (2,)
        assert len(first[0]) == len(second[0])
        assert len(third[0]) - len(first[0]) in (0, 1)  # who is cut off may have heard the others
        assert all(map(torch.equal, first[0][-1], second[0][-1]))
        assert "away for longer than 0.4 s" in str(third[1].__cause__)
        for one in stars:
            one.close()
        proxy.close()
