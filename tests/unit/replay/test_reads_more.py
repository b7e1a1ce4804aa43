"""Blocks that read more than their arguments: refused on all sites, and nothing is left behind."""

from __future__ import annotations

import copy
import random
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events, relative_error
from outergrad.replay import chain, context
from ranks import run_on_lasting_groups
from replaying import Stack, check, ids, loss, train

GLOBAL = {"factor": 1.0, "calls": 0}


class Scaled(nn.Module):
    """A block whose output is scaled by what `read` finds."""

    def __init__(self, read):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.read, self.factor, self.calls, self.seen = read, 1.0, 0, []

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.read(self))


class Around(nn.Module):
    """Sets the block's attribute before each use, to what it is called with."""

    def __init__(self, read):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(6, 8), Scaled(read), nn.Linear(8, 3)

    def forward(self, x, *factors):
        y = self.stem(x)
        for factor in factors:
            self.block.factor = factor
            y = self.block(y)
        return self.head(y)


def _counted(block):
    block.calls += 1
    return 1 + block.calls / 10


def _listed(block):
    block.seen.append(1.0)
    return len(block.seen)


def _global_count(block):
    GLOBAL["calls"] += 1
    return GLOBAL["calls"] / 10


def _closure():
    calls = []
    return lambda block: calls.append(1) or len(calls)


READS = {
    "counter": _counted,
    "list": _listed,
    "global counter": _global_count,
    "closure": _closure(),
    "random": lambda block: random.random(),
    "numpy": lambda block: np.random.rand(),
    "time": lambda block: time.perf_counter() % 1,
    "second": lambda block: block.factor,
}

METHODS = {
    "plain": og.EDAD(blocks=["block"], always=True),
    "int8": og.EDAD(blocks=["block"], always=True, wire=og.wire.Int8()),
    "topk": og.EDAD(blocks=["block"], always=True, wire=og.wire.TopK(0.5)),
}


def refused(model, method, steps, sites=2):
    """What each site raises in the first step that is refused; in each its own `factors`."""

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, method, group=group)
        torch.manual_seed(rank)
        for factors_S in steps:
            replica.zero_grad()
            y = replica(torch.randn(4 + rank, 6), *factors_S[rank])
            try:
                loss(y).backward()
            except RuntimeError as error:
                assert all(p.grad is None for p in replica.parameters())
                session.detach()
                return str(error)
        session.detach()
        return None

    return run_on_lasting_groups(sites, body)


def assert_all_say_the_same(found, *words):
    assert len(set(found)) == 1, found
    for word in words:
        assert word in found[0], found[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("read", READS)
def test_what_changes_until_the_replay_is_refused_by_name(read, method):
    """The sender's own replay shows it already."""
    torch.manual_seed(1)
    factors = [(1.0, 2.0)] * 2 if read == "second" else [(1.0,)] * 2
    found = refused(Around(READS[read]), METHODS[method], [factors])
    words = "block 'block'", "site 0", "Pass values as arguments", "leave the block out of blocks="
    assert_all_say_the_same(found, *words)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["number", "tensor", "shape"])
def test_what_is_another_on_another_site_is_refused_by_name(kind, method):
    torch.manual_seed(1)
    other = {"number": 2.0, "tensor": torch.full((8,), 2.0), "shape": torch.ones(5)}
    same = {"number": 1.0, "tensor": torch.ones(8), "shape": torch.tensor(1.0)}
    read = READS["second"]
    factors = [[(same[kind],), (same[kind],)], [(same[kind],), (other[kind],)]]
    if kind == "shape":  # of rows: what fits this site's batch does not fit another's
        factors = [[(torch.ones(4, 1),), (torch.ones(5, 1),)]]
    found = refused(Around(read), METHODS[method], factors)
    assert_all_say_the_same(found, "block 'block'", "site 0", "site 1")


def test_sites_that_see_no_difference_raise_the_same():
    """Only site 2 computes what it was sent otherwise: the others hear of it."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.odd = nn.Linear(8, 8), False

        def forward(self, x):
            return self.inner(x) * (2.0 if self.odd and len(x) == 5 else 1.0)

    torch.manual_seed(1)
    model = Around(READS["second"])
    model.block = Shared()

    def body(rank, group):
        replica = copy.deepcopy(model)
        replica.block.odd = rank == 2
        session = og.distribute(replica, METHODS["plain"], group=group)
        with pytest.raises(RuntimeError) as caught:
            loss(replica(torch.randn(4 + rank, 6), 1.0)).backward()
        assert not isinstance(caught.value, og.StepDiscardedError)
        session.detach()
        return str(caught.value)

    found = run_on_lasting_groups(3, body)
    assert_all_say_the_same(found, "block 'block'", "site 2 computed again what site 1 sent")


def test_the_attribute_is_fine_where_all_sites_have_it():
    torch.manual_seed(1)
    inputs = [(torch.randn(4 + rank, 6), torch.tensor(1.5)) for rank in range(2)]
    check(Around(READS["second"]), METHODS["plain"], inputs, ["block.first.weight"])


def test_training_goes_on_after_a_refusal():
    """The next step is exact once the cause is gone."""
    torch.manual_seed(1)
    model, x = Around(READS["second"]), [torch.randn(4, 6), torch.randn(5, 6)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, METHODS["plain"], group=group)
        with pytest.raises(RuntimeError, match="was not applied on any site"):
            loss(replica(x[rank], 1.0 + rank)).backward()
        loss(replica(x[rank], 1.0)).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    whole = copy.deepcopy(model).double()
    for batch in x:
        (loss(whole(batch.double(), 1.0)) / 2).backward()
    for gradients in run_on_lasting_groups(2, body):
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name


class Counting(nn.Module):
    """Counts, lists and draws, but computes the same: a replay must leave no trace of it."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.lines = nn.Linear(8, 8), 0, []
        self.told, self.names, self.last = {"n": {"of": 0}}, set(), None

    def forward(self, x):
        self.calls += 1
        self.lines.append(self.calls)
        self.told["n"]["of"] += 1
        self.names.add(self.calls)
        self.last, self.__dict__["new"] = x.detach(), self.calls
        random.random(), np.random.rand(), torch.rand(())
        return self.inner(x)


@pytest.mark.parametrize("wire", [(), og.wire.Int8()])
def test_a_replay_leaves_everything_as_it_was(wire):
    """Attributes count the forwards of this site; of Python and numpy as much is drawn as there."""
    model = Around(READS["second"])
    model.block = Counting()
    method = og.EDAD(blocks=["block"], always=True, wire=wire)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, method, group=group)
        for step in range(1, 4):
            x = torch.randn(4 + rank, 6)
            loss(replica(x, 1.0)).backward()
            block = replica.block
            assert block.calls == step
            assert block.lines == list(range(1, step + 1))
            assert block.told == {"n": {"of": step}}
            assert block.names == set(block.lines)
            assert block.new == step
            assert len(block.last) == len(x)
        session.detach()

    random.seed(3)
    np.random.seed(3)
    run_on_lasting_groups(2, body)
    python, numpy = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert python == [random.random() for _ in range(7)][-1]
    assert numpy == np.random.rand(7)[-1]


class Noisy(torch.autograd.Function):
    """Draws a number in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        torch.rand(3)
        return d


def test_the_backward_of_a_replay_leaves_torchs_stream_as_it_was():
    model = Around(READS["second"])
    model.block = nn.Sequential(nn.Linear(8, 8))
    model.block.register_forward_hook(lambda module, args, y: Noisy.apply(y))
    model.block[0].register_forward_hook(lambda module, args, y: Noisy.apply(y))
    turns = threading.Barrier(2)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, METHODS["plain"], group=group)
        y = loss(replica(torch.randn(4, 6, generator=torch.Generator()), 1.0))
        turns.wait()  # the stream is the process's: no backward while the other's forward runs
        y.backward()
        session.detach()

    torch.manual_seed(2)
    run_on_lasting_groups(2, body)
    found = torch.rand(3)
    torch.manual_seed(2)
    expected = [torch.rand(3) for _ in range(5)]  # two functions on two sites, and the next
    assert found.equal(expected[-1])


class Cached(nn.Module):
    """Builds a table when it needs a longer one, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.inner, self.table = nn.Linear(16, 16), None

    def forward(self, x):
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
        return self.inner(x) * self.table[: x.shape[1], None].to(x.dtype)


def test_a_table_that_grows_is_no_difference():
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(20, 16), nn.ModuleList([Cached(), Cached()])

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return x

    inputs = [(torch.randint(0, 20, (3, 4 + 3 * rank)),) for rank in range(2)]
    check(Model(), og.EDAD(blocks=["layers.*"], always=True), inputs, ["layers.0.inner.weight"])


class Dropping(nn.Module):
    """A stem, and a chain with dropout between its layers."""

    def __init__(self, p, function):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        between = [nn.Dropout(p)] if p else [function]
        self.chain = nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 8))

    def forward(self, x):
        return self.chain(torch.tanh(self.stem(x)))


@pytest.mark.parametrize("kind", ["dropout", "slope"])
def test_a_setting_of_a_chain_that_sites_do_not_share_is_refused(kind):
    torch.manual_seed(1)
    model = Dropping(0.5 if kind == "dropout" else 0.0, nn.LeakyReLU(0.1))

    def body(rank, group):
        replica = copy.deepcopy(model)
        if kind == "dropout":
            replica.chain[1].p = 0.5 + rank / 4
        else:
            replica.chain[1].negative_slope = 0.1 + rank
        session = og.distribute(replica, og.EDAD(always=True, inputs="raw"), group=group)
        with pytest.raises(RuntimeError) as caught:
            loss(replica(torch.randn(4, 6))).backward()
        session.detach()
        return str(caught.value)

    found = run_on_lasting_groups(2, body)
    assert_all_say_the_same(found, "block 'chain.0 ... chain.2'", "another method for it")


def test_masks_that_a_device_draws_otherwise_are_refused(monkeypatch):
    """As on a GPU, which draws other numbers from the same seed."""
    torch.manual_seed(1)
    model, draw = Dropping(0.5, None), context.replayed

    def otherwise(seed, device):
        return draw(seed and f"{int(seed, 16) ^ 1:016x}", device)

    monkeypatch.setattr(chain, "replayed", otherwise)

    def body(rank, group):
        with pytest.raises(RuntimeError, match=r"kind of device") as caught:
            train(
                model, og.EDAD(always=True, inputs="raw"), [(torch.randn(4, 6),)] * 2, rank, group
            )
        return str(caught.value)

    assert_all_say_the_same(run_on_lasting_groups(2, body), "block 'chain.0 ... chain.2'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wire", [(), og.wire.Int8()])
def test_rounding_is_no_difference(dtype, wire):
    """Blocks of transformers with dropout under autocast, linked from the second step on."""
    torch.manual_seed(1)
    model, inputs = Stack(dropout=0.2), ids(2)

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["layers.*"], always=True, wire=wire)
        session = og.distribute(replica, method, group=group)
        for _ in range(4):
            replica.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                y = loss(replica(*inputs[rank]).float())
            y.backward()
            assert session.stats().layers["layers.0 ... layers.2"].travels == "replayed"
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_block_that_computes_on_another_kind_of_machine_is_like_its_forward(monkeypatch):
    """Products that are rounded to TF32 on one site alone."""
    torch.manual_seed(1)
    model = Stack()

    def body(rank, group):
        replica = copy.deepcopy(model)
        for layer in replica.layers:
            layer.linear2.register_forward_pre_hook(
                lambda _, args: _as_tf32(*args) if rank else None
            )
        train(replica, og.EDAD(blocks=["layers.*"], always=True), ids(2), rank, group)

    run_on_lasting_groups(2, body)


def _as_tf32(x):
    return x + (torch.round(x.detach() * 1024) / 1024 - x.detach())


def test_it_is_refused_where_gradients_stay_on_a_site_too():
    torch.manual_seed(1)
    model = Around(READS["counter"])

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, METHODS["plain"], group=group)
        with (
            session.no_sync(),
            pytest.raises(RuntimeError, match=r"block 'block': this backward computed it again"),
        ):
            loss(replica(torch.randn(4, 6), 1.0)).backward()
        session.detach()

    run_on_lasting_groups(2, body)


def test_recorders_are_told_of_the_step_and_the_site():
    torch.manual_seed(1)
    model = Around(READS["second"])

    def body(rank, group):
        replica, events = copy.deepcopy(model), Events()
        session = og.distribute(replica, METHODS["plain"], group=group, recorder=events)
        with pytest.raises(RuntimeError):
            loss(replica(torch.randn(4, 6), 1.0 + rank)).backward()
        session.detach()
        return [event for event in events if isinstance(event, og.events.Mishap)]

    for mishaps in run_on_lasting_groups(2, body):
        (mishap,) = mishaps
        told = mishap.step, mishap.what, mishap.sites, mishap.layer
        assert told == (0, "discarded", (1,), "block.first.weight")
