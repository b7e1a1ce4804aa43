"""What every board must do: that of a process group's store, and that of a hub."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outergrad.comm.board import StoreBoard
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.errors import BoardGoneError
from outergrad.star import slots
from outergrad.star.board import StarBoard
from outergrad.star.frames import Kind
from outergrad.star.run import Run
from ranks import run_ranks
from stars import CPU, comms_on_star, hub, star

LONG = bytes(range(256)) * 5000
"""More than a piece."""


def on_torch(sites, body):
    return run_ranks(sites, lambda rank, group: body(TorchDistributed().open(CPU, group=group)))


def on_blind_star(sites, body):
    return comms_on_star(sites, body, settings={"blind": True})


RUNS = {"torch": on_torch, "star": comms_on_star, "blind star": on_blind_star}


@pytest.fixture(params=RUNS)
def run(request):
    return RUNS[request.param]


def meet(comm):
    """No site is before this any more."""
    comm.all_reduce(torch.ones(1)).wait()


def test_of_several_texts_in_a_slot_one_stands_for_all(run):
    def body(comm):
        found = [comm.board.first(f"slot {k}", f"of {comm.rank}") for k in range(5)]
        return found, [comm.board.slot(f"slot {k}") for k in range(5)]

    (found, read), *others = run(3, body)
    assert all(other == (found, read) for other in others)
    assert found == read
    assert set(found) <= {"of 0", "of 1", "of 2"}


def test_what_nobody_has_written_is_not_there(run):
    found = run(2, lambda comm: (comm.board.slot("a"), comm.board.get("b")))
    assert found == [(None, None)] * 2


def test_contents_of_any_length_are_there_for_all(run):
    def body(comm):
        board, own = comm.board, f"of {comm.rank}"
        board.put(own, LONG if comm.rank else b"")
        meet(comm)
        found = [board.get(f"of {rank}") for rank in range(comm.world_size)]
        meet(comm)
        return found

    assert run(2, body) == [[b"", LONG]] * 2


def test_what_a_site_drops_is_gone_or_stays_whole(run):
    """A board may keep it, but no reader finds half of it, and other contents stay."""

    def body(comm):
        board, own = comm.board, f"of {comm.rank}"
        board.put(own, LONG)
        board.put(f"{own} too", LONG)
        meet(comm)
        if comm.rank == 0:
            board.drop(own)
        meet(comm)
        found = [board.get("of 0"), board.get("of 1"), board.get("of 0 too")]
        meet(comm)
        return found

    for dropped, *others in run(2, body):
        assert dropped in (None, LONG)
        assert others == [LONG, LONG]


def test_a_board_with_another_limit_is_the_same_board(run):
    def body(comm):
        patient = comm.board.within(60.0)
        patient.first("text", "first")
        patient.put(f"of {comm.rank}", LONG)
        meet(comm)
        found = comm.board.slot("text"), comm.board.get("of 1"), patient.get("of 0")
        meet(comm)
        return found

    assert run(2, body) == [("first", LONG, LONG)] * 2


def test_a_store_that_stalls_for_a_while_is_gone_only_for_those_that_do_not_wait():
    class Slow:
        def compare_set(self, key, expected, text):
            time.sleep(0.3)
            return text.encode()

    hasty = StoreBoard(Slow(), limit_s=0.05)
    assert hasty.within(20.0).first("slot", "text") == "text"
    with pytest.raises(BoardGoneError):
        hasty.first("slot", "text")


def test_a_store_frees_what_is_dropped():
    def body(comm):
        comm.board.put("content", LONG)
        keys = comm.board._store.num_keys()
        comm.board.drop("content")
        assert comm.board.get("content") is None
        return keys - comm.board._store.num_keys()

    freed, _ = on_torch(2, lambda comm: None if comm.rank else body(comm))
    assert freed == -(-len(LONG) // (1 << 18)) + 1


def test_what_several_write_at_once_is_of_one_of_them(run):
    def body(comm):
        comm.board.put("step", LONG + bytes([comm.rank]))
        meet(comm)
        found = comm.board.get("step")
        meet(comm)
        return found

    first, second = run(2, body)
    assert first == second
    assert first[:-1] == LONG


def test_many_threads_may_ask(run):
    def body(comm):
        with ThreadPoolExecutor(8) as threads:
            texts = [f"{comm.rank} {k}" for k in range(40)]
            return list(threads.map(comm.board.without_limit().first, texts, texts)) == texts

    assert all(run(2, body))


def test_what_is_put_again_changes_nothing_on_a_hub():
    """Or another site could read something else there: a slot is written once."""

    def body(comm):
        comm.board.put(f"of {comm.rank}", b"first")
        comm.board.put(f"of {comm.rank}", b"second")
        comm.board.put("of all", b"%d" % comm.rank)
        meet(comm)
        found = [comm.board.get(key) for key in ("of 0", "of 1", "of all")]
        meet(comm)
        return found

    first, second = comms_on_star(2, body)
    assert first == second
    assert first[:2] == [b"first"] * 2


# -- of a hub -------------------------------------------------------------------------------------


def test_a_board_goes_on_when_its_site_has_left():
    def body(comm):
        comm.close()
        return comm.board.first("slot", "there"), comm.board.slot("slot")

    assert comms_on_star(2, body) == [("there", "there")] * 2


def test_a_hub_that_is_gone_is_told():
    with hub(1) as server:
        one = star(server, 0)
        comm = one.open(CPU)
        board = StarBoard(comm._line, 0.3)
        board.put("key", b"content")
        server.stop()
        with pytest.raises(BoardGoneError, match="the hub has not answered within"):
            board.get("key")


def test_a_full_board_is_told(monkeypatch):
    monkeypatch.setattr(slots, "MOST_BYTES", 10_000)

    def body(comm):
        comm.board.put("short", b"content")
        with pytest.raises(BoardGoneError, match="no room"):
            comm.board.put("long", bytes(20_000))
        return comm.board.get("short")

    assert comms_on_star(2, body) == [b"content"] * 2


def test_a_blind_hub_reads_no_content_and_cannot_pass_off_one_for_another(monkeypatch):
    seen, exchanged = [], {}
    take = Run.take

    def swapping(run, member, frame):
        """A hub that answers with the content of another key."""
        seen.append(bytes(frame.payload))
        if frame.kind == Kind.GET and exchanged:
            run._slots._contents[b"a"] = run._slots._contents[b"b"]
        take(run, member, frame)

    monkeypatch.setattr(Run, "take", swapping)

    def body(comm):
        for key in ("a", "b"):
            comm.board.put(key, b"a secret of " + key.encode())
        meet(comm)
        found = comm.board.get("a")
        meet(comm)
        exchanged["now"] = True
        return found, comm.board.get("a")

    assert on_blind_star(2, body) == [(b"a secret of a", None)] * 2
    assert not any(b"secret" in payload for payload in seen)
