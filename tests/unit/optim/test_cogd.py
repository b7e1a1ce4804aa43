"""Cogradient descent: its step by hand, where it applies, and its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.optim import CoGD
from ranks import run_on_lasting_groups

PLAIN = {"rule": "sgd", "momentum": 0.0, "small": 1.0, "large": 0.5, "lr": 0.01}


def problem(samples=1, seed=0):
    """Returns codes (J, N), a dictionary (P, J), what they are to make, and their loss."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, samples), (6, 4), (6, samples)
    x, a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    x[1] *= 0.05  # small, so that the coupling applies

    def loss(codes, dictionary):
        return (dictionary @ codes - b).square().sum() / 2

    return nn.Parameter(x), nn.Parameter(a), loss, b


def trained(optimizer, x, a, loss, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(x, a).backward()
        optimizer.step()


def by_hand(x, a, b, *, steps, lr, small, large, most=1.0, coupling=1.0, l1=0.0):
    """The paper's formula by loops, for one sample: x_j gets x_j Σ_i Ĝ_i dA_ij/dx_j as well."""
    before = None
    for _ in range(steps):
        residual = [sum(a[i, j] * x[j] for j in range(len(x))) - b[i] for i in range(len(b))]
        norms = [a[:, j].norm() for j in range(len(x))]
        new_x, new_a = x.clone(), a.clone()
        for j in range(len(x)):
            own = sum(residual[i] * a[i, j] for i in range(len(b)))
            through = 0.0
            weak = abs(x[j]) < small * x.abs().mean()
            if before is not None and weak and norms[j] >= large * sum(norms) / len(norms):
                dx, da = x[j] - before[0][j], a[:, j] - before[1][:, j]
                dx = dx.sign() * max(abs(dx), da.abs().max() / most)
                through = x[j] * sum(residual[i] * da[i] / dx for i in range(len(b)))
            new_x[j] -= lr * (own + coupling * through)
            new_x[j] = new_x[j].sign() * max(abs(new_x[j]) - lr * l1, 0.0)
            for i in range(len(b)):
                new_a[i, j] -= lr * residual[i] * x[j]
        before, x, a = (x, a), new_x, new_a
    return x, a


@pytest.mark.parametrize("most", [0.1, 1.0, 1e9])
@pytest.mark.parametrize("l1", [0.0, 0.3])
@pytest.mark.parametrize("coupling", [0.5, 1.0])
def test_a_step_of_one_sample_is_the_papers(most, l1, coupling):
    x, a, loss, b = problem()
    more = {"most": most, "l1": l1, "coupling": coupling}
    start = x.detach()[:, 0].clone(), a.detach().clone()
    trained(CoGD([{"params": [x, a], "pair": (0, 1)}], **PLAIN, **more), x, a, loss)
    settings = {name: PLAIN[name] for name in ("lr", "small", "large")}
    expected = by_hand(*start, b[:, 0], steps=5, **settings, **more)
    alone = by_hand(*start, b[:, 0], steps=5, **settings, **more | {"coupling": 0.0})
    torch.testing.assert_close(x.detach()[:, 0], expected[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a.detach(), expected[1], rtol=1e-10, atol=1e-12)
    assert not alone[0].allclose(expected[0], rtol=1e-6)


def test_the_gradient_of_many_samples_is_that_along_the_last_step():
    """Where a moves with x as it did, the loss changes as the coupled gradient says."""
    x, a, loss, _ = problem(samples=3)
    optimizer = CoGD([{"params": [x, a], "pair": (0, 1)}], **PLAIN | {"small": 1e9}, most=1e9)
    trained(optimizer, x, a, loss, steps=1)
    before = [optimizer.state[p]["before"] for p in (x, a)]
    start = [p.detach().clone() for p in (x, a)]
    trained(optimizer, x, a, loss, steps=1)
    found = (start[0] - x.detach()) / PLAIN["lr"]
    for j, n in ((0, 1), (1, 2)):
        slope_P = (start[1] - before[1])[:, j] / (start[0] - before[0])[j, n] / 3  # of 3 samples
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        unit = torch.zeros_like(start[0])
        unit[j, n] = 1
        turned = torch.zeros_like(start[1])
        turned[:, j] = slope_P
        loss(start[0] + t * unit, start[1] + t * turned).backward()
        torch.testing.assert_close(found[j, n], t.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("more", [{"small": 0.0}, {"large": 1e9}, {"lr": 0.0}])
def test_where_it_does_not_apply_nothing_is_coupled(more):
    """No entry is small, or no column large, or nothing has moved."""
    ours, theirs = problem(), problem()
    settings = PLAIN | more
    trained(CoGD([{"params": [*ours[:2]], "pair": (0, 1)}], **settings), *ours[:3])
    trained(
        CoGD([{"params": [*theirs[:2]], "pair": (0, 1)}], **settings, coupling=0.0), *theirs[:3]
    )
    assert all(p.equal(q) for p, q in zip(ours[:2], theirs[:2], strict=True))


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (-1, 0)])
def test_a_pair_may_share_any_dimension(pair):
    """Transposed variables move as they would untransposed."""
    x, a, loss, _ = problem(samples=3)
    turned = [
        nn.Parameter((x if pair[0] == 0 else x.mT).detach().clone()),
        nn.Parameter((a if pair[1] == 1 else a.mT).detach().clone()),
    ]

    def turned_loss(codes, dictionary):
        return loss(
            codes if pair[0] == 0 else codes.mT, dictionary if pair[1] == 1 else dictionary.mT
        )

    trained(CoGD([{"params": turned, "pair": pair}], **PLAIN), *turned, turned_loss)
    trained(CoGD([{"params": [x, a], "pair": (0, 1)}], **PLAIN), x, a, loss)
    for p, q, as_is in zip((x, a), turned, (pair[0] == 0, pair[1] == 1), strict=True):
        torch.testing.assert_close(p, q if as_is else q.mT, rtol=1e-12, atol=1e-12)


def test_parameters_without_a_pair_move_as_by_adamw():
    ours = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(4, 3))]
    theirs = copy.deepcopy(ours)
    optimizers = (
        CoGD(ours, lr=0.1, weight_decay=0.1, l1=1.0),
        torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1),
    )
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(p.equal(q) for p, q in zip(ours, theirs, strict=True))


def test_sgd_is_pytorchs():
    ours, theirs = nn.Parameter(torch.randn(5)), nn.Parameter(torch.zeros(5))
    theirs.data.copy_(ours)
    optimizers = (
        CoGD([ours], lr=0.1, rule="sgd", momentum=0.9),
        torch.optim.SGD([theirs], lr=0.1, momentum=0.9),
    )
    for _ in range(3):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_the_penalty_leaves_zeros():
    x, a, loss, _ = problem()
    trained(CoGD([{"params": [x, a], "pair": (0, 1)}], lr=0.01, l1=10.0), x, a, loss, steps=20)
    assert (x == 0).any()
    assert (a != 0).all()


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_the_penalty_has_its_minimum_where_it_should(rule):
    """Of (x - b)² / 2 + λ |x| the least is at b, moved to zero by λ."""
    b = torch.tensor([2.0, -1.0, 0.2, -0.4], dtype=torch.float64)
    x, a = (nn.Parameter(torch.zeros_like(b)) for _ in range(2))
    optimizer = CoGD([{"params": [x, a], "pair": (0, 0)}], lr=0.01, l1=0.5, rule=rule, coupling=0.0)
    for _ in range(3000):
        optimizer.zero_grad()
        ((x - b).square().sum() / 2 + 0 * a.sum()).backward()
        optimizer.step()
    expected = torch.tensor([1.5, -0.5, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(x.detach(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_saved_state_goes_on_as_if_never_stopped(rule):
    x, a, loss, _ = problem(samples=2)

    def made(x, a):
        return CoGD([{"params": [x, a], "pair": (0, 1)}], lr=0.01, l1=0.01, small=1.0, rule=rule)

    first = made(x, a)
    trained(first, x, a, loss, steps=3)
    other = [nn.Parameter(p.detach().clone()) for p in (x, a)]
    second = made(*other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    trained(first, x, a, loss, steps=3)
    trained(second, *other, loss, steps=3)
    assert all(p.equal(q) for p, q in zip((x, a), other, strict=True))


def test_one_of_a_pair_alone_moves_by_its_own_gradient():
    x, a, loss, _ = problem()
    optimizer = CoGD([{"params": [x, a], "pair": (0, 1)}], **PLAIN)
    trained(optimizer, x, a, loss, steps=2)
    before = x.detach().clone(), a.detach().clone()
    optimizer.zero_grad()
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert x.equal(before[0])
    torch.testing.assert_close(a.detach(), before[1] - PLAIN["lr"])


def test_a_closure_may_make_the_gradients():
    x, a, loss, _ = problem()
    optimizer = CoGD([{"params": [x, a], "pair": (0, 1)}], **PLAIN)

    def closure():
        optimizer.zero_grad()
        found = loss(x, a)
        found.backward()
        return found

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"lr": -1.0}, "lr=-1.0; use 0 or more"),
        ({"l1": -1.0}, "l1=-1.0; use 0 or more"),
        ({"most": 0.0}, "most=0.0; use more than 0"),
        ({"rule": "newton"}, "rule='newton'; use 'adam' or 'sgd'"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"pair": (0, 0)}, r"parameter 0 of a group \(4, 2\) and parameter 1 of a group \(6, 4\)"),
        ({"pair": (0, 7)}, "name a dimension of each"),
        ({"pair": (0,)}, "name a dimension of each"),
        ({"pair": (0, 1), "params": [nn.Parameter(torch.ones(4))]}, "give it two"),
        (
            {"pair": (0, 0), "params": [nn.Parameter(torch.ones(2).cfloat()) for _ in range(2)]},
            "is complex; use one of real numbers",
        ),
        (
            {"pair": (0, 0), "params": [nn.Parameter(torch.ones(0)) for _ in range(2)]},
            "is empty",
        ),
    ],
)
def test_what_makes_no_step_is_refused_in_one_line(group, said):
    x, a, *_ = problem(samples=2)
    optimizer = CoGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=said) as found:
        optimizer.add_param_group({"params": [x, a], **group})
    assert "\n" not in str(found.value)
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = CoGD([*table.named_parameters()])
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match="CoGD: weight has a sparse gradient"):
        optimizer.step()
    assert table.weight.equal(before)


def test_replicas_of_two_sites_stay_equal():
    def site(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
        session = og.distribute(model, og.DAD(), group=group)
        pair = [model[1].weight, model[0].weight]
        others = [model[0].bias, model[1].bias, *model[3].parameters()]
        optimizer = CoGD(
            [{"params": pair, "pair": (0, 0), "small": 9.0}, {"params": others}], lr=0.05
        )
        torch.manual_seed(1 + rank)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(3, 1, 6, 6)).square().mean().backward()
            optimizer.step()
        session.detach()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_on_lasting_groups(2, site)
    assert all(p.equal(q) for p, q in zip(first, second, strict=True))
