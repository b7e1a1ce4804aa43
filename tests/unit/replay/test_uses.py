"""What modules that are computed again may do, and what is refused by name."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import outergrad as og
from cases import relative_error
from ranks import run_on_lasting_groups
from replaying import check, loss, pooled, rows


class Added(nn.Module):
    """The output of the first block is changed in place before the second one reads it."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.stem(x)
        a = self.first(x)
        a += x
        return self.second(a).tanh()


def test_an_output_may_be_changed_in_place():
    """A sum hands its delta on as it is: it must not be taken for the output itself."""
    torch.manual_seed(1)
    check(Added(), og.EDAD(blocks=["first", "second"], always=True), rows(2, 6))


class Behind(nn.Module):
    """A layer and then a block."""

    def __init__(self, block):
        super().__init__()
        self.stem, self.block = nn.Linear(6, 8), block

    def forward(self, x):
        return self.block(self.stem(x))


METHOD = og.EDAD(blocks=["block"], always=True)


class Shared(nn.Module):
    """Autograd returns one tensor for two of its gradients, and an expanded one for the third."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.first, self.second = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.scales = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.inner(x) + (self.first + self.second)) * self.scales.sum()


def test_gradients_are_in_memory_of_their_own():
    torch.manual_seed(1)
    model = Behind(Shared())
    batches = [rows(2, 6) for _ in range(3)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, METHOD, group=group)
        with session.no_sync():
            for batch in batches[:2]:
                loss(replica(*batch[rank])).backward()
        loss(replica(*batches[2][rank])).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    wholes = [pooled(model, batch) for batch in batches]
    for gradients in run_on_lasting_groups(2, body):
        for name, gradient in gradients.items():
            expected = sum(whole[name] for whole in wholes)
            assert relative_error(gradient, expected) < 5e-6, name


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x += 1
        return self.inner(x)


class CountsInATensor(InPlace):
    def __init__(self):
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Spectrum(InPlace):
    def forward(self, x):
        return torch.fft.rfft(self.inner(x))


REFUSED = {
    "input changed in place": (InPlace, RuntimeError, "changes one of its inputs in place"),
    "tensor changed in place": (
        CountsInATensor,
        RuntimeError,
        "changes the tensor 'calls' in place",
    ),
    "complex": (Spectrum, TypeError, "a tensor of torch.complex64, which cannot be sent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_again_is_refused_by_name(name):
    block, error, message = REFUSED[name]

    def body(rank, group):
        model = Behind(block())
        og.distribute(model, METHOD, group=group)
        with pytest.raises(error, match=f"block 'block': .*{message}"):
            model(torch.randn(3, 6))

    run_on_lasting_groups(2, body)


def replaced(model):
    model.block.weight = nn.Parameter(torch.randn(8, 8))


def converted(model):
    model.block.double()


@pytest.mark.parametrize("change", [replaced, converted])
def test_parameters_that_were_replaced_or_converted_are_named(change):
    def body(rank, group):
        model = Behind(nn.Linear(8, 8))
        og.distribute(model, METHOD, group=group)
        change(model)
        with pytest.raises(RuntimeError, match=r"'block.weight' was replaced or converted"):
            model(torch.randn(3, 6))

    run_on_lasting_groups(2, body)


MODELS = {
    "block": (lambda: Behind(nn.Linear(8, 8)), METHOD),
    "chain": (lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), og.EDAD(always=True)),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_somebody_else_get_their_own_gradients(name):
    build, method = MODELS[name]
    model, (x,) = build(), rows(1, 6)[0]
    others = {n: torch.randn_like(p).requires_grad_() for n, p in model.named_parameters()}
    expected = torch.autograd.grad(
        loss(torch.func.functional_call(model, others, (x,))), others.values()
    )

    def body(rank, group):
        replica = copy.deepcopy(model)
        mine = {n: t.detach().clone().requires_grad_() for n, t in others.items()}
        session = og.distribute(replica, method, group=group)
        loss(torch.func.functional_call(replica, mine, (x,))).backward()
        session.detach()
        return [t.grad for t in mine.values()]

    for gradients in run_on_lasting_groups(2, body):
        for gradient, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, right)


class Forked(Added):
    def forward(self, x):
        a = self.first(self.stem(x).tanh())
        return self.second(a) + a


def test_a_batch_without_rows_teaches_nothing():
    """Of no numbers it cannot be told whether a delta came from one use alone."""
    torch.manual_seed(1)
    model, inputs = Forked(), rows(2, 6)

    def body(rank, group):
        replica = copy.deepcopy(model)
        method = og.EDAD(blocks=["first", "second"], always=True)
        session = og.distribute(replica, method, group=group)
        replica(torch.randn(0, 6)).sum().backward()
        for _ in range(2):
            replica.zero_grad()
            loss(replica(*inputs[rank])).backward()
        session.detach()
        return {name: p.grad for name, p in replica.named_parameters()}

    expected = pooled(model, inputs)
    for gradients in run_on_lasting_groups(2, body):
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name


DROPPING = {
    "block": METHOD,
    "chain": og.EDAD(always=True),
}


@pytest.mark.parametrize("name", DROPPING)
def test_sites_may_be_in_training_and_not(name):
    """Every site computes the rows of another as that one did."""
    torch.manual_seed(1)
    parts = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)]
    model, inputs = Behind(nn.Sequential(*parts)), rows(2, 6)

    def body(rank, group):
        replica = copy.deepcopy(model).train(rank == 0)
        session = og.distribute(replica, DROPPING[name], group=group)
        for _ in range(2):
            replica.zero_grad()
            loss(replica(*inputs[rank])).backward()
            assert replica.block[3].training == (rank == 0)
        session.detach()
        return [p.grad for p in replica.parameters()]

    first, second = run_on_lasting_groups(2, body)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_a_loss_that_is_kept_keeps_no_activations():
    def body(rank, group):
        model = Behind(nn.Linear(8, 8))
        session = og.distribute(model, METHOD, group=group)
        losses, stems = [], []
        model.stem.register_forward_hook(
            lambda _, args, out: stems.append(StorageWeakRef(out.untyped_storage()))
        )
        for _ in range(3):
            losses.append(loss(model(torch.randn(3, 6))))
            losses[-1].backward()
        session.detach()
        gc.collect()
        return [stem.expired() for stem in stems]

    assert all(all(gone) for gone in run_on_lasting_groups(2, body))
