"""Blocks: what enters a module and the delta of what leaves it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import outergrad as og
from cases import relative_error
from outergrad.replay import context
from ranks import run_on_lasting_groups
from replaying import (
    Stack,
    assert_all_have,
    check,
    ids,
    loss,
    pooled,
    rows,
    train_seeded,
)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sites", [2, 3])
def test_a_stack_of_transformer_blocks_is_exact(sites, masked):
    torch.manual_seed(1)
    model, inputs = Stack(), ids(sites)
    if masked:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        inputs = [(*batch, mask) for batch in inputs]
    travels = [name for name, _ in model.layers.named_parameters(prefix="layers")]
    check(model, og.EDAD(blocks=["layers.*"], always=True), inputs, travels)


@pytest.mark.parametrize("sites", [2, 3])
def test_dropout_is_drawn_again(sites, monkeypatch):
    """Every site draws the masks of all sites: the gradient is that of those masks."""
    torch.manual_seed(1)
    model, inputs = Stack(dropout=0.2), ids(sites)
    method = og.EDAD(blocks=["layers.*"], always=True)
    found = train_seeded(monkeypatch, model, method, inputs, steps=3)
    whole = copy.deepcopy(model).double()
    for rank, (batch,) in enumerate(inputs):
        (loss(seeded(whole, batch, range(100 * rank + 6, 100 * rank + 9))) / sites).backward()
    assert_all_have(found, whole)


def seeded(model, batch, seeds):
    """The forward of a stack with a seed per block."""
    handles = [
        layer.register_forward_pre_hook(lambda *_, seed=seed: torch.manual_seed(seed) and None)
        for layer, seed in zip(model.layers, seeds, strict=True)
    ]
    y = model(batch)
    for handle in handles:
        handle.remove()
    return y


def test_a_block_without_dropout_changes_no_random_number():
    before = torch.get_rng_state()
    with context.recorded(torch.device("cpu")) as draws:
        pass
    assert draws.seed is None
    assert torch.get_rng_state().equal(before)
    with context.recorded(torch.device("cpu")) as draws:
        first = torch.rand(3)
    assert not torch.get_rng_state().equal(before)
    with context.replayed(draws.seed, torch.device("cpu")):
        assert torch.rand(3).equal(first)


def test_blocks_that_follow_each_other_send_one_delta():
    torch.manual_seed(1)
    model, inputs = Stack(), ids(2)

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(blocks=["layers.*"], always=True), group=group)
        sent = []
        for _ in range(3):
            replica.zero_grad()
            loss(replica(*inputs[rank])).backward()
            sent.append(session.stats().layers["layers.0 ... layers.2"].sent_bytes)
        session.detach()
        return sent

    for rank, sent in enumerate(run_on_lasting_groups(2, body)):
        tensor = 4 * inputs[rank][0].numel() * 16
        assert 6 * tensor < sent[0] < 6 * tensor + 2000  # not known yet who reads what
        assert sent[1] == sent[2]
        assert 2 * tensor < sent[1] < 2 * tensor + 2000


class Forked(nn.Module):
    """The output of the first block goes to the second and, if asked, past it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.stem = nn.Linear(6, 8)

    def forward(self, x, past):
        a = self.first(torch.tanh(self.stem(x)))
        b = self.second(a)
        return b + a if bool(past) else b


def test_an_output_that_is_read_elsewhere_too_keeps_its_own_delta():
    torch.manual_seed(1)
    inputs = [(torch.randn(4, 6), torch.tensor(True)) for _ in range(2)]
    check(Forked(), og.EDAD(blocks=["first", "second"], always=True), inputs)


def test_what_was_read_once_and_is_read_twice_voids_one_step():
    torch.manual_seed(1)
    model = Forked()
    batches = [torch.randn(4, 6) for _ in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["first", "second"], always=True)
        session = og.distribute(replica, method, group=group)
        for step in range(5):
            replica.zero_grad()
            past = torch.tensor(step >= 3 and rank == 0)
            y = loss(replica(batches[rank], past))
            if step != 3:
                y.backward()
            elif rank == 0:
                with pytest.raises(RuntimeError, match=r"'first' was read by 'second' alone"):
                    y.backward()
            else:
                with pytest.raises(og.StepDiscardedError):
                    y.backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    inputs = [(batches[rank], torch.tensor(rank == 0)) for rank in range(2)]
    expected = pooled(model, inputs)
    for gradients in run_on_lasting_groups(2, body):
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name


class Cross(nn.Module):
    """A block that is given tuples, keywords and plain values, and returns a dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, pair, *, scale, how, extra=None):
        a, b = pair
        y = (a @ self.weight) * scale
        y = y.tanh() if how == "tanh" else y
        return {"y": y + b @ self.weight, "shape": y.shape, "ids": extra}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.cross = nn.Linear(5, 6), Cross()

    def forward(self, x, scale):
        a, b = self.stem(x), torch.relu(self.stem(-x))
        out = self.cross((a, b), scale=scale, how="tanh", extra=torch.arange(3))
        assert out["shape"] == a.shape
        assert out["ids"].equal(torch.arange(3))
        return out["y"]


def test_tuples_keywords_and_plain_values_travel_too():
    torch.manual_seed(1)
    inputs = [(x, torch.rand(6)) for (x,) in rows(2, 5)]
    check(Around(), og.EDAD(blocks=["cross"], always=True), inputs, ["cross.weight"])


def test_what_cannot_be_sent_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x, helper):
            return self.inner(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x):
            return self.odd(self.stem(x), object())

    def body(rank, group):
        model = Outer()
        og.distribute(model, og.EDAD(blocks=["odd"], always=True), group=group)
        with pytest.raises(TypeError, match=r"block 'odd': its argument 'helper' holds an object"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


def test_nothing_of_a_step_is_kept():
    """Activations and deltas of blocks are let go of when backward has returned."""

    def body(rank, group):
        model = Stack()
        session = og.distribute(model, og.EDAD(blocks=["layers.*"], always=True), group=group)
        kept = []
        model.layers[0].register_forward_hook(lambda _, args, out: kept.append(weakref.ref(out)))
        for _ in range(3):
            loss(model(torch.randint(0, 20, (3, 5)))).backward()
        session.detach()
        gc.collect()
        return [tensor() is None for tensor in kept]

    assert all(all(gone) for gone in run_on_lasting_groups(2, body))


def test_detach_leaves_the_model_plain():
    def body(rank, group):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), Stack())
        before = [type(m) for m in model.modules()]
        session = og.distribute(model, og.EDAD(blocks=["4.layers.*"]), group=group)
        assert [type(m) for m in model.modules()] != before
        session.detach()
        assert [type(m) for m in model.modules()] == before

    run_on_lasting_groups(2, body)
