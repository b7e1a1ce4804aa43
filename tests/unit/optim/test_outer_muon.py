"""`OuterMuon`: its formula, whole matrices that take turns in signs, and what it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import outergrad as og
from cases import mlp
from outergrad.optim import Muon, OuterMuon, muon_groups
from outergrad.optim.outer_muon import largest_singular_value
from ranks import run_ranks


def few():
    """Signs of all entries; what they lose of vectors and tables alone is remembered."""
    return og.Sparse(
        density=1.0,
        select="random_blocks",
        block=256,
        wire=og.wire.Sign(),
        vectors=og.wire.Int4(),
        always=True,
    )


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (4, 3, 2, 2)])
def test_a_matrix_goes_as_far_in_each_direction_as_its_change_in_the_longest(shape):
    p = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    start, p.grad = p.detach().clone(), torch.randn(shape, dtype=torch.float64)
    OuterMuon([p], lr=0.5).step()
    u, s, vh = torch.linalg.svd(p.grad.flatten(1), full_matrices=False)
    ones = s / s.norm()
    for _ in range(5):
        ones = 3.4445 * ones - 4.7750 * ones**3 + 2.0315 * ones**5
    length = largest_singular_value(p.grad.flatten(1))
    expected = start.flatten(1) - 0.5 * length * (u * ones) @ vh
    torch.testing.assert_close(p.detach().flatten(1), expected, rtol=1e-9, atol=1e-10)


def test_matrices_of_a_stack_and_of_one_shape_move_as_each_would_alone():
    alone = [nn.Parameter(torch.randn(4, 6, dtype=torch.float64)) for _ in range(5)]
    stack = nn.Parameter(torch.stack([p.detach() for p in alone]))
    several = [nn.Parameter(p.detach().clone()) for p in alone]
    stack.grad = torch.stack([10.0**k * torch.randn_like(p) for k, p in enumerate(alone)])
    for p, q, change in zip(alone, several, stack.grad, strict=True):
        p.grad, q.grad = change.clone(), change.clone()
        OuterMuon([p]).step()
    OuterMuon(several).step()
    OuterMuon([{"params": [stack], "matrices": True, "stacked": True}]).step()
    for p, q, moved in zip(alone, several, stack, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(moved, p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 7), (40, 3), (64, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_largest_singular_value_is_found_from_below(shape, dtype):
    for seed in range(5):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        true = torch.linalg.matrix_norm(x, ord=2)
        found = largest_singular_value(x)
        assert 0.93 * true <= found <= 1.0001 * true


def test_vectors_go_to_their_mean_and_nothing_moves_without_a_change():
    vector, still, zero = (nn.Parameter(torch.randn(n)) for n in ((5,), (3, 3), (3, 3)))
    start = [p.detach().clone() for p in (vector, still, zero)]
    vector.grad, zero.grad = torch.randn(5), torch.zeros(3, 3)
    OuterMuon([vector, still, zero]).step()
    assert vector.equal(start[0] - vector.grad)
    assert still.equal(start[1])
    assert zero.equal(start[2])


@pytest.mark.parametrize("make", [Muon, OuterMuon])
def test_a_matrix_without_elements_stays(make):
    empty, other = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(3, 5))
    empty.grad, other.grad = torch.zeros(0, 5), torch.ones(3, 5)
    make([{"params": [empty, other], "matrices": True}]).step()
    assert empty.shape == (0, 5)
    assert other.all()


@pytest.mark.parametrize("setting", [{"lr": 0.0}, {"lr": -1.0}, {"steps": 0}])
def test_values_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=r"OuterMuon: \w+=.*; use "):
        OuterMuon([nn.Parameter(torch.zeros(2, 2))], **setting)


class Reader(nn.Module):
    """Model with a parameter of each kind that Muon tells apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.experts = nn.Parameter(0.3 * torch.randn(3, 8, 8))
        self.into = nn.Conv1d(8, 8, 1)
        self.across = nn.Conv1d(8, 6, 3, padding=1)
        self.hidden = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = (self.token(ids) + self.positions) @ self.experts.mean(dim=0)
        x = self.across(self.into(x.mT)).mT
        return self.head(self.norm(self.hidden(x)))


def share_of_longest(change):
    """Returns the median singular value over the largest one, of a matrix or the least of some."""
    values = torch.linalg.svdvals(change)
    return (values.median(dim=-1).values / values[..., 0]).min()


def test_what_muon_leaves_to_adam_becomes_its_mean():
    def body(rank, group):
        model = Reader()
        before = copy.deepcopy(model)
        session = og.distribute(model, og.LocalSteps(1, outer=OuterMuon), group=group)
        for p in model.parameters():  # a change of one direction, and a bit in all others
            p.grad = torch.full_like(p, 1.0 + rank) + 0.2 * torch.randn_like(p)
        own = {name: p.grad for name, p in model.named_parameters()}
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        session.detach()
        starts = dict(before.named_parameters())
        return {n: ((starts[n] - p).detach(), own[n]) for n, p in model.named_parameters()}

    first, second = run_ranks(2, body)
    for name, (moved, own) in first.items():
        mean = (own + second[name][1]) / 2
        if name in ("experts", "across.weight", "hidden.weight"):
            rows = (3, 8, 8) if name == "experts" else (len(mean), -1)
            assert share_of_longest(mean.reshape(rows)) < 0.2, name
            assert share_of_longest(moved.reshape(rows)) > 0.5, name
        else:
            torch.testing.assert_close(moved, mean, rtol=1e-5, atol=1e-6)


def test_rules_that_were_given_stay_and_more_can_be_left_to_adam():
    model, copies = Reader(), Reader()
    by_name = dict(copies.named_parameters())
    pairs = {p: by_name[name] for name, p in model.named_parameters()}
    given = [by_name.pop("head.weight")]
    rest = [{"params": [*by_name.values()], "lr": 0.5}]
    made = OuterMuon([{"params": given, "matrices": True}, *rest], adam=("across.*",))
    made.regroup(model, pairs)
    names = {id(p): name for name, p in copies.named_parameters()}
    found = {
        (g["matrices"], g["stacked"], g["lr"]): sorted(names[id(p)] for p in g["params"])
        for g in made.param_groups
    }
    assert found.pop((True, False, 1.6)) == ["head.weight"]
    assert found.pop((True, True, 0.5)) == ["experts"]
    assert found.pop((True, False, 0.5)) == ["hidden.weight"]
    assert [*found] == [(False, False, 0.5)]
    assert copy.deepcopy(made).param_groups[1]["adam"] == ("across.*",)


def test_a_vector_among_matrices_is_refused_by_name():
    def body(rank, group):
        def muon(params):
            return OuterMuon([{"params": params, "matrices": True}])

        with pytest.raises(
            ValueError, match=r"'0\.bias' is a vector in a group with matrices=True"
        ):
            og.distribute(net(), og.LocalSteps(1, outer=muon), group=group)

    run_ranks(2, body)


def test_tables_are_matrices_where_they_are_to_be():
    copies = Reader()
    pairs = dict(zip(Reader().parameters(), copies.parameters(), strict=True))
    made = OuterMuon([*copies.parameters()], tables=True)
    names = {id(p): name for name, p in copies.named_parameters()}
    found = {names[id(p)] for p in made.regroup(nn.Linear(2, 2), pairs)}
    assert {"token.weight", "head.weight", "into.weight", "hidden.weight"} < found
    assert "positions" not in found
    assert "head.bias" not in found


@pytest.mark.parametrize("density", [1.0, 0.5])
@pytest.mark.parametrize("reduce", ["gather", "two_way"])
def test_what_signs_lose_of_a_whole_matrix_alone_is_forgotten(density, reduce):
    def body(rank, group):
        model, method = Reader(), replace(few(), density=density, block=4, reduce=reduce)
        steps = og.LocalSteps(1, outer=OuterMuon, method=method, error_reset=True)
        session = og.distribute(model, steps, group=group)
        optimizer = Muon(muon_groups(model), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 5), rank)).square().mean().backward()
            optimizer.step()
        (state,) = session.state_dict()["exchanges"]
        session.detach()
        return {name.split("/")[0] for name in state["own"]["memories"]}

    names = {name for name, _ in Reader().named_parameters()}
    whole = {"experts", "across.weight", "hidden.weight"} if density == 1 else set()
    for kept in run_ranks(2, body):
        assert kept == names - whole, names - whole ^ kept


def net():
    torch.manual_seed(0)
    return mlp(12, 16, 8, 4)


def trained(rank, group, stream, steps, model):
    """Trains at one site, and returns its weights."""
    model = copy.deepcopy(model)
    session = og.distribute(
        model,
        og.LocalSteps(3, stream=stream, outer=OuterMuon, method=few()),
        group=group,
    )
    optimizer = Muon(muon_groups(model), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=data)).square().mean().backward()
        optimizer.step()
    session.flush()
    session.detach()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stream", [1, 3])
@pytest.mark.parametrize("sites", [2, 3])
def test_sites_have_the_same_weights_after_a_flush(stream, sites):
    results = run_ranks(sites, partial(trained, stream=stream, steps=7, model=net()))
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


def test_the_mean_of_signs_goes_as_far_in_all_directions():
    layer = nn.Linear(96, 24, bias=False)

    def muon(params):  # a single layer is the head, which would become its mean
        return OuterMuon([{"params": params, "matrices": True}])

    def body(rank, group):
        model = copy.deepcopy(layer)
        session = og.distribute(model, og.LocalSteps(1, outer=muon, method=few()), group=group)
        optimizer = Muon([{"params": model.parameters(), "matrices": True}], lr=0.01)
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(rank))
        (model(x) - x[:, :24]).square().mean().backward()
        optimizer.step()
        session.detach()
        return torch.linalg.svdvals(layer.weight - model.weight).detach()

    length = 0.01 * 0.2 * 96**0.5  # of Muon's own step in each direction
    for moved in run_ranks(2, body):
        assert moved.min() > 0.5 * moved.max()
        assert 0.5 * length < moved.median() < 1.6 * length
