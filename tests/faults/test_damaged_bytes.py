"""What reaches a site damaged is applied by none; other than it reaches the others, is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty import FaultyComm, own_comm
from torch import Tensor, nn

import outergrad as og
from cases import mlp
from covering import covering
from outergrad.messages import header, wire
from outergrad.messages.header import KNOWN
from ranks import run_on_lasting_groups, run_ranks

STEPS, DAMAGED = 6, 3
SIZE = 24
Hit = Callable[[Tensor], None]
"""Changes the words of a message that begins with a preamble."""


class Recorded:
    every = 1000

    def __init__(self):
        self.mishaps = []

    def record(self, event):
        if isinstance(event, og.events.Mishap):
            self.mishaps.append((event.what, event.step, event.sites, event.layer))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, SIZE), nn.BatchNorm1d(SIZE), nn.Tanh())
        self.head = mlp(SIZE, SIZE, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


JOINT = og.PerLayer({"encoder.*": og.Local(), "*": og.DAD(always=True)}, joint=True)
torch.manual_seed(4)
MODEL = Parts()


def to_site_1(of: Callable[[int], bool], hit: Hit) -> Callable[[int, int, list[Tensor]], None]:
    """Hits what site 1 receives of site 0 in messages of these buckets, the first time."""

    def change(rank, index, parts):
        words = parts[0].view(-1).view(torch.uint8)
        words = words[: len(words) // 8 * 8].view(torch.int64)
        marked = len(words) > 7 and int(words[0]) == header.MAGIC
        if rank == 1 and marked and of(int(words[3])) and own_comm().armed:
            hit(words)
            own_comm().armed = False

    return change


def flipped(words: Tensor) -> None:
    words[len(words) * 2 // 3] ^= 1 << 40


def resealed(change: Hit) -> Hit:
    """With a checksum that is right: as a site would send that tells every site something else."""

    def hit(words):
        change(words)
        wire._seal(words.view(torch.uint8))

    return hit


def failed(words: Tensor) -> None:
    words[5] = wire.State.FAILED


def buffers(bucket: int) -> bool:
    return bucket == wire.BUFFERS


def deltas(bucket: int) -> bool:
    return bucket >= wire.DELTAS


def factors(bucket: int) -> bool:
    return bucket < wire.BUFFERS


def second_round(bucket: int) -> bool:
    return bucket < 0


def trained(method: Any, rank: int, group: Any, model: nn.Module, **options: Any) -> Any:
    """What was raised, in which step, and the buffers and gradients of the last one.

    Where steps wait for votes, that is the damaged step; else the one after it.
    """
    recorded = Recorded()
    session = og.distribute(model, method, group=group, recorder=recorded, **options)
    generator = torch.Generator().manual_seed(rank)
    told = {}
    for step in range(STEPS):
        model.zero_grad()
        own_comm().armed = step == DAMAGED
        y = model(torch.randn(5, 6, generator=generator))
        try:
            y.square().mean().backward()
        except (og.StepDiscardedError, og.DriftError) as error:
            told[step] = type(error), str(error)
            assert all(p.grad is None for p in model.parameters())
        if step == DAMAGED + 1 and told.get(step, [None])[0] is og.DriftError:
            session.make_equal()
    own = session.own_names
    session.detach()
    state = {n: t.clone() for n, t in model.named_buffers() if n not in own}
    return told, recorded.mishaps, state | {n: p.grad for n, p in model.named_parameters()}


def outcome(sites: int, method: Any, **options: Any) -> tuple[dict[int, Any], Any]:
    """What all sites were told, in the same words; in the end they are alike.

    Site 1, which was told something else, may have heard of it a step before the others.
    """

    def body(rank, group):
        return trained(method, rank, group, copy.deepcopy(MODEL), **options)

    results = run_on_lasting_groups(sites, body)
    (told, mishaps, state), *others = results
    for rank, (other_told, other_mishaps, other) in enumerate(others, 1):
        kept = {step: one for step, one in other_told.items() if rank != 1 or step in told}
        assert kept == told
        assert other_mishaps[-len(mishaps) :] == mishaps or not mishaps
        assert all(torch.equal(other[name], t) for name, t in state.items() if "head" in name)
        assert all(t.isfinite().all() for t in other.values())
    return told, mishaps


@pytest.mark.parametrize("kind", ["broadcast", "mean"])
@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)])
def test_a_buffer_with_a_flipped_bit_is_sent_again(faulty, method, sites, kind):
    hits = []

    def hit(words):
        flipped(words)
        hits.append(words)

    faulty.change = staticmethod(to_site_1(buffers, hit))
    assert outcome(sites, method, buffers=kind) == ({}, [])
    assert len(hits) == 1


@pytest.mark.parametrize("sites", [2, 3])
def test_a_flipped_bit_of_a_mean_delta_is_refused(faulty, sites):
    """The site that sees it goes on to the vote; its own parts have no gradients of it either."""
    faulty.change = staticmethod(to_site_1(deltas, flipped))
    told, mishaps = outcome(sites, JOINT)
    ((step, (kind, words)),) = told.items()
    assert (step, kind) == (DAMAGED, og.StepDiscardedError)
    assert "site 1 refused a message of site 0 with the mean deltas below a site's own" in words
    assert [mishap[:3] for mishap in mishaps] == [("discarded", DAMAGED, (0,))]


SIGNS = og.Sparse(density=0.5, select="random", wire=og.wire.Sign(), reduce="two_way", always=True)
EQUIVOCATED: dict[str, Any] = {
    "factors": (og.DAD(always=True), factors, flipped),
    "triplets": (og.RankDAD(rank=2), factors, flipped),
    "entries": (og.Sparse(density=0.3, always=True), factors, flipped),
    "merged triplets": (og.RankDAD(rank=2, reduce="two_way"), second_round, flipped),
    "merged signs": (SIGNS, second_round, flipped),
    "blocks": (og.EDAD(blocks=["head"], inputs="raw", always=True), factors, flipped),
    "state": (og.DAD(always=True), factors, failed),
    "buffers": (og.DAD(), buffers, flipped),
    "mean deltas": (JOINT, deltas, flipped),
}


WAIT_FOR_VOTES = ("blocks", "mean deltas")


@pytest.mark.parametrize(("what", "sites"), covering(list(EQUIVOCATED), [2, 3], quick=3))
def test_a_site_that_tells_each_site_something_else_is_found_out(faulty, what, sites):
    """Each message by itself is as it was sent; of two sites nobody can say which is right."""
    method, of, change = EQUIVOCATED[what]
    faulty.change = staticmethod(to_site_1(of, resealed(change)))
    told, mishaps = outcome(sites, method, buffers="mean")
    ((step, (kind, words)),) = told.items()
    waits = what in WAIT_FOR_VOTES
    assert step == (DAMAGED if waits else DAMAGED + 1)
    assert kind is (og.StepDiscardedError if waits else og.DriftError)
    if sites == 2:
        assert "sites 0, 1 received different messages or sums in step 3" in words
    else:
        assert "site 1 received other messages or sums than the others in step 3" in words
    what = "discarded" if waits else "drifted"
    assert mishaps == [(what, step, (0, 1) if sites == 2 else (1,), "")]


def test_a_first_round_with_a_flipped_bit_ends_the_training_and_names_the_sender(faulty):
    """Whether a second round follows is then not known at the site that reads it."""
    first_round = lambda bucket: factors(bucket) and not second_round(bucket)  # noqa: E731
    faulty.change = staticmethod(to_site_1(first_round, flipped))

    def body(rank, group):
        method = og.RankDAD(rank=2, reduce="two_way")
        with pytest.raises(og.SiteLostError) as caught:
            trained(method, rank, group, copy.deepcopy(MODEL), timeout=10)
        return str(caught.value)

    assert "from site 0: the checksum of a message is wrong" in run_ranks(3, body)[1]


def test_headers_that_differ_per_receiver_are_found_out(faulty):
    """In the first step, which has headers; the plan is the same with either."""

    def change(rank, index, parts):
        if rank == 1:
            parts[0][5] += 1  # the weight
            words = parts[0].tolist()
            parts[0][8] = header.sum_of_words([*words[KNOWN:8], 0, *words[9:]])

    faulty.change, faulty.kind = staticmethod(change), "header"

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.Dense(), group=group)
        own_comm().armed = True
        model(torch.ones(5, 6)).square().mean().backward()
        own_comm().armed = False
        with pytest.raises(og.DriftError, match="sites 0, 1 received different"):
            model(torch.ones(5, 6)).square().mean().backward()
        session.detach()

    run_ranks(2, body)


def test_a_site_that_says_that_it_failed_and_votes_otherwise_is_found_out(faulty):
    """Nobody has its gradients then: without a word the step would count and bring nothing."""

    def change(rank, index, parts):
        words = parts[0].view(torch.int64)
        if int(words[0]) == header.MAGIC and factors(int(words[3])):
            failed(words)
            wire._seal(parts[0])

    faulty.change = staticmethod(change)
    told, _ = outcome(3, og.DAD(always=True))
    assert list(told) == [DAMAGED, DAMAGED + 1]
    for kind, words in told.values():
        assert kind is og.DriftError
        assert "a site said that it failed in step 3, and voted for it" in words


def read_again(sites: int, model: nn.Module, method: Any, x: Tensor) -> None:
    """Site 1 cannot read what site 0 sent, and asks for it again."""

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, method, group=group)
        own_comm().armed = True
        replica(x).square().mean().backward()
        assert rank != 1 or not own_comm().armed
        own_comm().armed = False
        found = [p.grad.clone() for p in replica.parameters()]
        replica.zero_grad()
        replica(x).square().mean().backward()
        session.detach()
        return found

    first, *others = run_on_lasting_groups(sites, body)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_ids_that_a_table_has_not_are_refused(faulty):
    """They would be written behind its end, or to another row."""

    def change(words):
        at = next(k for k in range(8, len(words)) if words[k : k + 3].tolist() == [1, 2, 4])
        words[at + 1] = 7

    faulty.change = staticmethod(to_site_1(factors, resealed(change)))
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 2))
    read_again(2, model, og.DAD(always=True), torch.tensor([1, 4, 2]))


def test_places_that_a_row_has_not_are_refused(faulty):
    def change(words):
        places = words[10:].view(torch.int16)
        places[places == 33] = 999

    faulty.change = staticmethod(to_site_1(factors, resealed(change)))
    model = nn.Linear(34, 2)
    x = torch.linspace(0, 1, 34).expand(1, 34)
    read_again(2, model, og.DAD(always=True, wire=og.wire.TopK(0.1)), x)


@pytest.mark.parametrize("select", ["topk", "blocks"])
def test_entries_that_a_weight_has_not_are_refused(faulty, select):
    """They would be added to others, or written behind the end."""

    def change(words):
        words[-2:] = -1  # the places, the last of the message

    faulty.change = staticmethod(to_site_1(factors, resealed(change)))
    model = nn.Linear(34, 2, bias=False)
    x = torch.linspace(0, 1, 34).expand(1, 34)
    method = og.Sparse(density=0.1, select=select, block=4, always=True)
    read_again(2, model, method, x)


def test_a_message_of_which_the_length_cannot_be_is_refused_by_name(faulty):
    """No site takes the memory, and gloo ends no process."""

    def change(rank, index, parts):
        if rank == 1:
            words = parts[0].tolist()
            at = max(k for k in range(9, 64) if words[k])  # the last word is that of the block
            parts[0][at] = words[at] = header.BlockUse(1 << 39, True).encode()
            parts[0][8] = header.sum_of_words([*words[KNOWN:8], 0, *words[9:]])

    faulty.change, faulty.kind = staticmethod(change), "header"

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        method = og.EDAD(blocks=["head"], inputs="raw", always=True)
        og.distribute(model, method, group=group, timeout=2.0)
        own_comm().armed = True
        with pytest.raises(og.SiteLostError) as caught:
            model(torch.ones(3, 6)).sum().backward()
        return str(caught.value)

    told = run_ranks(2, body)
    assert "site 0 announced a message of" in told[1]


def test_a_model_that_arrives_damaged_is_not_trained(monkeypatch):
    class Comm(FaultyComm):
        def broadcast(self, t):
            super().broadcast(t)
            if self.rank == 1:
                t.view(-1).view(torch.uint8)[77] ^= 8

    monkeypatch.setattr("outergrad.comm.process_group.TorchComm", Comm)

    def body(rank, group):
        with pytest.raises(og.SiteLostError, match="did not reach site 1 as it was sent"):
            og.distribute(copy.deepcopy(MODEL), group=group)

    run_ranks(3, body)
