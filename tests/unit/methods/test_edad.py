"""edAD: what it refuses, what it sends, what else may happen in a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from cases import relative_error
from ranks import run_on_lasting_groups, try_ranks
from replaying import (
    Stack,
    assert_all_have,
    ids,
    loss,
    pooled,
    rows,
    train,
    whole_error,
)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.stem(x))


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


REFUSED = {
    "no such module": (lambda: nn.Sequential(nn.Linear(4, 4)), "7", "matches no module"),
    "running statistics": (Norm, "norm", "keeps running statistics"),
    "tied": (tied, "2", "is tied to a parameter outside"),
    "no parameters": (tied, "1", "no trained parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_again_is_refused_by_name(name):
    build, pattern, message = REFUSED[name]

    def body(rank, group):
        og.distribute(build(), og.EDAD(blocks=[pattern]), group=group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_block_that_changes_a_buffer_is_refused_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 4), Block())
        og.distribute(model, og.EDAD(blocks=["1"], always=True), group=group)
        with pytest.raises(RuntimeError, match=r"block '1': its forward changes the buffer"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


def test_what_enters_the_model_is_not_sent_unasked():
    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4))
        og.distribute(model, og.EDAD(blocks=["0"], always=True), group=group)
        with pytest.raises(ValueError, match="block '0' reads what enters the model"):
            model(torch.randn(3, 4))

    run_on_lasting_groups(2, body)


BYTES = {
    "edad": (og.EDAD(always=True), og.DAD(always=True), 0.62),
    "edad raw": (
        *(og.EDAD(always=True, inputs="raw"), og.DAD(always=True, reveal="activations")),
        0.56,
    ),
}


def sent(model, method, inputs):
    def body(rank, group):
        return train(model, method, inputs, rank, group, 3)[1].stats().sent_bytes

    return run_on_lasting_groups(len(inputs), body)[0]


@pytest.mark.parametrize("name", BYTES)
def test_a_deep_chain_takes_little_more_than_half_of_the_bytes(name):
    ours, other, most = BYTES[name]
    layers = [m for _ in range(10) for m in (nn.Linear(256, 256), nn.ReLU())]
    model, inputs = nn.Sequential(*layers[:-1]), [(torch.randn(32, 256),) for _ in range(2)]
    assert sent(model, ours, inputs) <= most * sent(model, other, inputs)


def test_a_stack_of_blocks_takes_a_fifth_of_the_bytes():
    model, inputs = Stack(4, 64), [(torch.randint(0, 20, (8, 16)),) for _ in range(2)]
    ours = sent(model, og.EDAD(blocks=["layers.*"], always=True), inputs)
    assert ours <= 0.2 * sent(model, og.DAD(always=True, reveal="activations"), inputs)


WIRES = {
    "bf16": (og.wire.BF16(), 0.02, 0.52),
    "int8": (og.wire.Int8(), 0.03, 0.28),
    "all that there is": (og.wire.TopK(1.0), 5e-6, 1.6),
}


@pytest.mark.parametrize("name", WIRES)
def test_activations_and_deltas_may_be_encoded(name):
    """Alike on all sites, with the codec's error and bytes."""
    codec, most_error, most_bytes = WIRES[name]
    torch.manual_seed(1)
    model, inputs = Stack(2, 64), ids(2, 16)
    expected = pooled(model, inputs)

    def body(rank, group):
        found = {}
        for wire in ((), codec):
            method = og.EDAD(blocks=["layers.*"], always=True, wire=wire)
            gradients, session = train(model, method, inputs, rank, group)
            found[wire] = gradients, session.stats().layers["layers.0 ... layers.1"].sent_bytes
        return found

    results = run_on_lasting_groups(2, body)
    gradients, sent = results[0][codec]
    assert 0 < whole_error(gradients, expected) < most_error
    assert sent < most_bytes * results[0][()][1]
    for name, gradient in results[1][codec][0].items():
        assert gradient.equal(gradients[name]), name


def test_no_more_is_sent_than_dense_would_be():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def body(rank, group):
        _, session = train(model, og.EDAD(), [(torch.randn(50, 6),)] * 2, rank, group)
        return {line.travels for line in session.coverage()}

    assert run_on_lasting_groups(2, body) == [{"dense"}] * 2


def test_batches_that_change_need_no_special_case():
    """Few rows, many, few again, none on a site: replayed, dense, replayed."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    counts = [(3, 4), (3, 4), (90, 4), (90, 4), (3, 2), (3, 2), (0, 5), (2, 2)]
    batches = [[torch.randn(n, 12) for n in pair] for pair in counts]

    def sum_loss(y):
        return (y * y).sum() / 10

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(), group=group)
        found, ways = [], []
        for batch in batches:
            replica.zero_grad()
            sum_loss(replica(batch[rank])).backward()
            found.append({n: p.grad.clone() for n, p in replica.named_parameters()})
            ways.append(session.coverage()[2].travels)
        session.detach()
        return found, ways

    for found, ways in run_on_lasting_groups(2, body):
        assert ways[0] == ways[1] == ways[-1] == "replayed"
        assert ways[2] == ways[3] == "dense"
        for batch, gradients in zip(batches, found, strict=True):
            whole = copy.deepcopy(model).double()
            for x in batch:
                (sum_loss(whole(x.double())) / 2).backward()
            for name, p in whole.named_parameters():
                assert relative_error(gradients[name], p.grad) < 5e-6, name


def test_accumulated_gradients_count():
    torch.manual_seed(1)
    model = Stack(2)
    batches = [[b[0] for b in ids(2)] for _ in range(3)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["layers.*"], always=True)
        session = og.distribute(replica, method, group=group)
        loss(replica(batches[0][rank])).backward()
        replica.zero_grad()
        with session.no_sync():
            loss(replica(batches[1][rank])).backward()
        loss(replica(batches[2][rank])).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    whole = copy.deepcopy(model).double()
    for batch in batches[1:]:
        for x in batch:
            (loss(whole(x)) / 2).backward()
    assert_all_have(run_on_lasting_groups(2, body), whole)


def test_a_penalty_on_a_weight_of_a_block_is_shared_too():
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    inputs = rows(2, 6)

    def value(m, x):
        return loss(m(x)) + m[2].weight.square().sum() * x.mean()

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.EDAD(always=True), group=group)
        for _ in range(3):
            replica.zero_grad()
            value(replica, inputs[rank][0]).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    whole = copy.deepcopy(model).double()
    for (x,) in inputs:
        (value(whole, x.double()) / 2).backward()
    assert_all_have(run_on_lasting_groups(2, body), whole)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="blocks='layers'"):
        og.EDAD(blocks="layers")
    with pytest.raises(ValueError, match="inputs='none'"):
        og.EDAD(inputs="none")
    with pytest.raises(ValueError, match="every=2; use 1 with blocks="):
        og.EDAD(blocks=["a"], every=2)
    assert og.EDAD(blocks=["a"]) == og.EDAD(blocks=("a",))
