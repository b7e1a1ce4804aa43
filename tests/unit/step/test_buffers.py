"""Buffers that forwards write to: rank 0's as with DDP, their mean, or each site's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import Boom
from outergrad.messages.wire import Preamble
from ranks import run_on_lasting_groups, run_ranks

SITES = 3
COUNTER, STATISTICS = 8, 2 * 16 * 4
"""Bytes."""
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "two_way": og.RankDAD(rank=2, reduce="two_way"),
    "all_reduce": og.PowerSGD(rank=2, min_ratio=1),
    "sparse": og.Sparse(density=0.05, always=True),
    "per layer": og.PerLayer({"0.*": og.Dense(), "*": og.DAD()}),
}


class Counting(nn.Module):
    """Counts its calls, and holds a table that nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(100_000.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.table[:16]


def _built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), Counting(), nn.Linear(16, 4))


_MODEL = _built()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator) + rank


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.named_buffers()}


def train(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()


def own_statistics(steps: int, sites: int = SITES) -> list[dict[str, Tensor]]:
    """What each site's buffers would be by themselves; the weights do not change."""
    models = [copy.deepcopy(_MODEL) for _ in range(sites)]
    for rank, model in enumerate(models):
        train(model, rank, range(steps))
    return [buffers_of(model) for model in models]


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


@pytest.mark.parametrize("kind", ["broadcast", "mean", "local"])
def test_what_becomes_of_running_statistics(method, kind):
    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        og.distribute(model, method, group=group, buffers=kind)
        train(model, rank, range(4))
        return buffers_of(model)

    own = own_statistics(4)
    for rank, found in enumerate(run_on_lasting_groups(SITES, body)):
        for name, t in found.items():
            if kind == "mean" and t.is_floating_point():
                torch.testing.assert_close(t, torch.stack([o[name] for o in own]).mean(0))
            else:
                assert torch.equal(t, own[rank if kind == "local" else 0][name]), name


def test_as_ddp():
    """Whose replicas have the statistics of rank 0 when a forward begins."""

    def body(rank, group):
        ours, theirs = copy.deepcopy(_MODEL), copy.deepcopy(_MODEL)
        og.distribute(ours, og.Dense(), group=group)
        wrapped = nn.parallel.DistributedDataParallel(theirs, process_group=group)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
        for step in range(3):
            for model, optimizer in zip((ours, wrapped), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
        if rank == 0:
            for name, t in buffers_of(theirs).items():
                torch.testing.assert_close(buffers_of(ours)[name], t)
        return buffers_of(ours)

    first, *others = run_ranks(2, body)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_bytes_are_those_of_what_is_written():
    """One message of rank 0's, of nothing that is constant; nothing at all in evaluation mode."""

    def body(rank, group):
        sent = {}
        for kind in ("local", "broadcast", "mean"):
            model = copy.deepcopy(_MODEL)
            session = og.distribute(model, og.DAD(always=True), group=group, buffers=kind)
            train(model, rank, range(4))
            trained = session.stats().sent_bytes
            model[1].eval()
            model[2].forward = lambda x: x
            train(model, rank, range(4))
            sent[kind] = trained, session.stats().sent_bytes
            session.detach()
        return sent

    written, start = STATISTICS + 2 * COUNTER, Preamble.nbytes(4, 0)
    for rank, sent in enumerate(run_on_lasting_groups(SITES, body)):
        usual = sent["local"][1]
        assert {kind: evaluated for kind, (_, evaluated) in sent.items()} == dict.fromkeys(
            sent, usual
        )
        others = SITES - 1
        assert sent["local"][0] == usual
        expected = start + written * (rank == 0)
        assert sent["broadcast"][0] == usual + others * expected
        expected = start + (written if rank == 0 else STATISTICS)
        assert sent["mean"][0] == usual + others * expected


def test_no_sync_and_evaluation_and_a_discarded_step():
    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        session = og.distribute(model, og.DAD(), group=group)
        with session.no_sync():
            train(model, rank, range(1))
        alone = buffers_of(model)
        try:
            hidden = Boom.apply(model[:3](batch(rank, 1)), rank == 1)
            model[3](hidden).square().mean().backward()
        except (ArithmeticError, og.StepDiscardedError):
            model.zero_grad()
        discarded = buffers_of(model)
        with torch.no_grad():
            model.eval()(batch(rank, 2))
        model.train()
        train(model, rank, range(2, 3))
        return alone, discarded, buffers_of(model)

    found = run_ranks(SITES, body)
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(found[0][0][name], found[1][0][name])
        assert not torch.equal(found[0][1][name], found[1][1][name])
    expected = own_statistics(3)[0]
    for _, _, now in found:
        assert torch.equal(now["1.running_mean"], expected["1.running_mean"])
        assert torch.equal(now["2.calls"], expected["2.calls"] + 1)  # evaluation called it, too


def test_sites_without_rows_or_batches_take_what_the_others_have():
    """The lowest site that has a batch is the source; means are by samples, if these count."""

    def body(rank, group):
        found = []
        for kind in ("broadcast", "mean"):
            model = copy.deepcopy(_MODEL)
            session = og.distribute(model, og.DAD(), group=group, buffers=kind, weighting="samples")
            with session.join(step=lambda: None):
                for step in range(2 if rank else 1):
                    model.zero_grad()
                    session.samples(rank)
                    model(batch(rank, step)).square().mean().backward()
            found.append(buffers_of(model))
            session.detach()
        return found

    sites = run_on_lasting_groups(SITES, body)
    models = [copy.deepcopy(_MODEL) for _ in range(SITES)]
    for step, active in enumerate(((0, 1, 2), (1, 2))):
        for site in active:
            models[site](batch(site, step))
        for name in ("1.running_mean", "1.running_var"):
            values = [dict(m.named_buffers())[name] for m in models]
            mean = (values[1] + 2 * values[2]) / 3
            for value in values:
                value.copy_(mean)
    reference = copy.deepcopy(_MODEL)
    reference(batch(0, 0))
    reference(batch(1, 1))
    for broadcast, mean in sites:
        for name, t in buffers_of(reference).items():
            assert torch.equal(broadcast[name], t)
        for name in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(mean[name], dict(models[0].named_buffers())[name])


def test_two_forwards_before_two_backwards():
    """What a graph has saved of a norm is not taken for changed."""

    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        og.distribute(model, og.DAD(), group=group)
        losses = [model(batch(rank, step)).square().mean() for step in range(2)]
        for loss in losses:
            loss.backward()
        return buffers_of(model)

    first, *others = run_on_lasting_groups(2, body)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


def test_what_backward_computes_again_counts():
    """Under checkpointing a norm runs once more in backward; all sites end with rank 0's."""

    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        og.distribute(model, og.DAD(), group=group)
        for step in range(3):
            model.zero_grad()
            checkpoint(model, batch(rank, step), use_reentrant=False).square().mean().backward()
        return buffers_of(model)

    first, *others = run_on_lasting_groups(SITES, body)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


class Odd(nn.Module):
    """Statistics without a counter, a buffer that is replaced, and one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.register_buffer("last", torch.zeros(2, 4))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        nn.functional.batch_norm(y, self.running_mean, self.running_var, training=self.training)
        self.last = y.detach()[:2]
        self.cache = torch.full((len(self.cache) + 1,), y.sum().item())
        return y


def test_norms_without_a_counter_and_buffers_that_are_replaced():
    original = Odd()

    def body(rank, group):
        model = copy.deepcopy(original)
        og.distribute(model, og.DAD(), group=group)
        train(model, rank, range(3))
        return buffers_of(model)

    first, second = run_on_lasting_groups(2, body)
    for name in ("running_mean", "running_var", "last"):
        assert torch.equal(first[name], second[name])
        assert not torch.equal(first[name], original.get_buffer(name))
    assert not torch.equal(first["cache"], second["cache"])  # of another shape than at the start


def test_replicas_end_equal_though_a_buffer_was_replaced_on_one_site():
    original = Odd()

    def body(rank, group):
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if rank else 0.2)
        session = og.distribute(model, og.DAD(), group=group)
        with session.join(step=optimizer.step):  # of another rate: what differs is copied
            for step in range(2 * rank):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()], buffers_of(model)

    (p, buffers), (q, others) = run_on_lasting_groups(2, body)
    assert all(torch.equal(a, b) for a, b in zip(p, q, strict=True))
    assert torch.equal(buffers["running_mean"], others["running_mean"])
    assert len(buffers["cache"]) == 1
    assert len(others["cache"]) == 3


def test_buffers_of_local_parts_stay():
    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        og.distribute(model, og.PerLayer({"1.*": og.Local(), "*": og.DAD()}), group=group)
        train(model, rank, range(2))
        return buffers_of(model)

    own = own_statistics(2)
    for rank, found in enumerate(run_on_lasting_groups(2, body)):
        assert torch.equal(found["1.running_mean"], own[rank]["1.running_mean"])


def test_local_steps_share_them_when_they_meet():
    def body(rank, group):
        model = copy.deepcopy(_MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = og.distribute(model, og.LocalSteps(2), group=group)
        between = []
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            between.append(model[1].running_mean.clone())
        session.detach()
        return between

    first, second = run_on_lasting_groups(2, body)
    assert [torch.equal(p, q) for p, q in zip(first, second, strict=True)] == [False, True] * 2


def test_another_word_is_refused():
    def body(rank, group):
        with pytest.raises(ValueError, match="broadcast, mean, local"):
            og.distribute(copy.deepcopy(_MODEL), group=group, buffers="all")
        with pytest.raises(ValueError, match="buffers"):
            og.distribute(
                copy.deepcopy(_MODEL), group=group, buffers=("mean", "local", "local")[rank]
            )

    run_on_lasting_groups(SITES, body)
