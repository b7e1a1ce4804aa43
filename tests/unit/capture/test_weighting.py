"""weighting="samples": the mean over the sites is that of one large batch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import outergrad as og
from cases import Boom
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from outergrad.capture.weighting import Weighting
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = 3
ROWS = [(1, 2, 4), (4, 2, 1), (1, 1, 1), (2, 0, 5), (3, 3, 1)]
"""Per step, of each site; low rank is exact up to eight rows in all."""


@pytest.fixture(params=SOME)
def method(request):
    return METHODS[request.param]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def large_batches() -> list[list[tuple[float, Tensor]]]:
    """All rows of a step as one batch."""
    sizes = list(enumerate(ROWS))
    return [[(1.0, torch.cat([batch(s, k, n) for s, n in enumerate(ns)]))] for k, ns in sizes]


def assert_equal_and_close(found: list[list[Tensor]], expected: list[Tensor]) -> None:
    for other in found[1:]:
        assert all(torch.equal(p, q) for p, q in zip(found[0], other, strict=True))
    assert_close(found[0], expected, 2e-4)


def detached(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def test_batches_of_other_sizes_are_as_one_large_batch(method):
    """A site without a row, too, whose mean over nothing is NaN."""

    def body(rank, group):
        model = net()
        optimizer = sgd(model.parameters())
        og.distribute(model, method, group=group, weighting="samples")
        for k, rows in enumerate(ROWS):
            optimizer.zero_grad()
            loss_of(model, batch(rank, k, rows[rank])).backward()
            optimizer.step()
        return detached(model)

    found = run_on_lasting_groups(SITES, body)
    assert_equal_and_close(found, pooled(step, large_batches(), sgd))


def test_the_loop_may_say_what_counts(method):
    """A loss that is a mean over what is not masked, of which there may be nothing: NaN."""
    kept = [(1, 0, 3), (2, 2, 0)]

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group, weighting="samples")
        gradients = []
        for k, counts in enumerate(kept):
            model.zero_grad()
            session.samples(counts[rank])
            model(batch(rank, k))[: counts[rank]].square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients

    found = run_on_lasting_groups(SITES, body)
    for k, counts in enumerate(kept):
        model = net().double()
        x = torch.cat([batch(site, k)[:n] for site, n in enumerate(counts)]).double()
        model(x).square().mean().backward()
        assert_equal_and_close([g[k] for g in found], [p.grad for p in model.parameters()])


@pytest.mark.parametrize("says", [False, True])
def test_samples_of_a_backward_that_raised_do_not_count(says):
    """The site that raised hears of the step's end only in its next backward, after the forward."""
    rows = (2, 5, 1)

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(), group=group, weighting="samples")
        for k in range(3):
            model.zero_grad()
            if says:
                session.samples(rows[rank])
            armed = (rank, k) == (1, 1)
            hook = model.first.register_forward_hook(lambda _, x, y, a=armed: Boom.apply(y, a))
            loss = loss_of(model, batch(rank, k, rows[rank]))
            hook.remove()
            try:
                loss.backward()
            except (ArithmeticError, og.StepDiscardedError):
                assert k == 1
        return [p.grad.clone() for p in model.parameters()]

    found = run_on_lasting_groups(SITES, body)
    model = net().double()
    x = torch.cat([batch(site, 2, n) for site, n in enumerate(rows)]).double()
    loss_of(model, x).backward()
    assert_equal_and_close(found, [p.grad for p in model.parameters()])


def test_accumulated_batches_count_by_all_their_samples(method):
    rows, passes = (1, 2), 2

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group, weighting="samples")
        for _ in range(2):
            model.zero_grad()
            with session.no_sync():
                loss_of(model, batch(rank, 0, rows[rank])).backward()
            loss_of(model, batch(rank, 1, rows[rank])).backward()
        return [p.grad for p in model.parameters()]

    reference = net().double()
    for k in range(passes):
        x = torch.cat([batch(site, k, n) for site, n in enumerate(rows)])
        loss_of(reference, x.double()).backward()
    found = run_on_lasting_groups(len(rows), body)
    assert_equal_and_close(found, [p.grad for p in reference.parameters()])


SPARSE = {
    "dense": og.Dense(every=2),
    "dad": og.DAD(always=True, every=2),
    "local steps": og.LocalSteps(2, outer=lambda params: torch.optim.SGD(params, lr=1.0)),
}


@pytest.mark.parametrize("name", SPARSE)
def test_what_travels_now_and_then_counts_by_all_samples_since(name):
    """Also when the session is saved and loaded between."""
    rows = (1, 3)
    share = [n / sum(rows) for n in rows]

    def body(rank, group):
        model, local = net(), name == "local steps"
        session = og.distribute(model, SPARSE[name], group=group, weighting="samples")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(rank, k, rows[rank])).backward()
            if local or k == 1:
                optimizer.step()
            if k == 0:
                state = copy.deepcopy(session.state_dict())
                session.load_state_dict(state)
        return detached(model)

    found = run_on_lasting_groups(len(rows), body)
    replicas = [net().double() for _ in rows]
    for site, replica in enumerate(replicas):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for k in range(2):
            if name == "local steps":
                optimizer.zero_grad()
            (loss_of(replica, batch(site, k, rows[site]).double())).backward()
            if name == "local steps" or k == 1:
                scale = 1 if name == "local steps" else 0.5
                for p in replica.parameters():
                    p.grad *= scale
                optimizer.step()
    sites = zip(*map(detached, replicas), strict=True)
    expected = [sum(s * p for s, p in zip(share, ps, strict=True)) for ps in sites]
    assert_equal_and_close(found, expected)


def test_equal_batches_cost_what_they_cost(method):
    """The same bytes in the same steps, and the same gradients to the bit."""

    def body(rank, group):
        found = []
        for weighting in ("sites", "samples"):
            model, sent = net(), []
            session = og.distribute(model, method, group=group, weighting=weighting)
            for k in range(4):
                model.zero_grad()
                loss_of(model, batch(rank, k, 2)).backward()
                sent.append(session.stats().sent_bytes)
            session.detach()
            found.append((sent, [p.grad for p in model.parameters()]))
        return found

    for (usual, p_grads), (sent, q_grads) in run_on_lasting_groups(SITES, body):
        assert sent == usual
        assert sent[3] <= sent[0]
        assert all(torch.equal(p, q) for p, q in zip(p_grads, q_grads, strict=True))


def test_without_any_sample_the_gradient_is_zero(method):
    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group, weighting="samples")
        for n in (2, 0):
            model.zero_grad()
            session.samples(n)
            loss = loss_of(model, batch(rank, n, 2))
            (loss if n else loss * float("nan")).backward()
        return [p.grad for p in model.parameters()]

    for gradients in run_on_lasting_groups(2, body):
        assert all(gradient.norm() < 1e-6 for gradient in gradients)


def test_forwards_before_the_last_step_count_as_they_did():
    """As in a GAN: two forwards, then two backwards."""
    rows = (1, 3)

    def body(rank, group):
        model = net()
        og.distribute(model, og.DAD(), group=group, weighting="samples")
        losses = [loss_of(model, batch(rank, k, rows[rank])) for k in range(2)]
        for loss in losses:
            loss.backward()
        return [p.grad for p in model.parameters()]

    reference = net().double()
    for k in range(2):
        x = torch.cat([batch(site, k, n) for site, n in enumerate(rows)])
        loss_of(reference, x.double()).backward()
    found = run_on_lasting_groups(len(rows), body)
    assert_equal_and_close(found, [p.grad for p in reference.parameters()])


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.weight.sum()


@pytest.mark.parametrize(
    ("args", "kwargs", "samples"),
    [
        ((torch.zeros(3, 2), torch.zeros(5)), {}, 3),
        (("text", torch.tensor(1.0), [torch.zeros(4)]), {}, 4),
        ((), {"inputs": {"ids": torch.zeros(6, 2)}}, 6),
        ((pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]),), {}, 2),
    ],
    ids=["first tensor", "nested", "keyword", "packed"],
)
def test_samples_are_the_first_dimension_of_the_first_tensor(args, kwargs, samples):
    model, weighting = Takes(), Weighting("samples")
    weighting.watch(model)
    with torch.no_grad():
        model(torch.zeros(9))  # an evaluation
    model(*args, **kwargs)
    assert weighting.weight == samples
    weighting.remove()
    assert type(model) is Takes


def test_a_model_that_is_a_layer_is_copied_plain():
    def body(rank, group):
        model = nn.Linear(3, 2)
        session = og.distribute(model, group=group, weighting="samples")
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        kinds = [type(twin) for twin in twins]
        session.detach()
        return [*kinds, type(model)]

    assert run_on_lasting_groups(2, body) == [[nn.Linear] * 3] * 2


def test_what_cannot_be_is_refused():
    def body(rank, group):
        def refused(error, match, method=None, **kwargs):
            with pytest.raises(error, match=match):
                og.distribute(net(), method, group=group, **kwargs)

        refused(ValueError, "weighting='rows'", weighting="rows")
        refused(ValueError, "weighting", weighting=("sites", "samples")[rank])
        mixed = og.PerLayer({"first.*": og.Dense(every=2), "*": og.Dense()})
        refused(ValueError, "first.bias.*every=2", mixed, weighting="samples")
        session = og.distribute(net(), group=group)
        with pytest.raises(RuntimeError, match="weighting='samples'"):
            session.samples(3)
        session.detach()
        model = net()
        session = og.distribute(model, group=group, weighting="samples")
        with pytest.raises(ValueError, match="whole number"):
            session.samples(-1)
        with pytest.raises(RuntimeError, match=r"session\.samples\(n\)"):
            model.last(torch.zeros(2, 48)).sum().backward()  # not through the model itself
        session.detach()

    run_on_lasting_groups(2, body)
