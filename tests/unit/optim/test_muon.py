"""Muon: its formula for matrices, Adam for the rest, and the parameters that each moves."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.optim import Muon, muon_groups, newton_schulz
from ranks import run_ranks


def trained(optimizer, params, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()


def reference(weight, grads, *, lr, momentum, nesterov, weight_decay):
    """The formula with its own loop, for one matrix (O, I)."""
    mean = torch.zeros_like(weight)
    for grad in grads:
        mean = momentum * mean + (1 - momentum) * grad
        direction = momentum * mean + (1 - momentum) * grad if nesterov else mean
        u, s, vh = torch.linalg.svd(direction, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        update = 0.2 * max(weight.shape) ** 0.5 * (u * s) @ vh
        weight = weight - lr * weight_decay * weight - lr * update
    return weight


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (4, 3, 2, 2)])
def test_a_matrix_follows_the_formula(shape, nesterov, weight_decay):
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    start = weight.detach().clone()
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": weight_decay}
    trained(Muon([weight], **settings), [weight])
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    expected = reference(start.flatten(1), [g.flatten(1) for g in grads], **settings)
    torch.testing.assert_close(weight.detach().flatten(1), expected, rtol=1e-9, atol=1e-10)


def test_the_rest_moves_as_by_adamw():
    ours = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(4, 3))]
    theirs = copy.deepcopy(ours)
    trained(Muon([{"params": ours, "matrices": False}], lr=0.1, weight_decay=0.1), ours)
    trained(torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1), theirs)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_it_moves_matrices_as_pytorchs_own_does():
    own = getattr(torch.optim, "Muon", None)
    if own is None:
        pytest.skip("this PyTorch has no Muon")
    ours = [nn.Parameter(torch.randn(32, 48))]
    theirs, start = copy.deepcopy(ours), ours[0].detach().clone()
    trained(Muon(ours, lr=0.1), ours)
    trained(own(theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), theirs)
    moved, wanted = ours[0].detach() - start, theirs[0].detach() - start
    assert (moved - wanted).norm() < 0.02 * wanted.norm()  # theirs has the 8 bits of bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_computes_in_a_type_that_is_named(dtype):
    p = nn.Parameter(torch.randn(6, 4))
    start, p.grad = p.detach().clone(), torch.randn(6, 4)
    Muon([p], lr=0.1, momentum=0.0, dtype=dtype).step()
    wanted = start - 0.1 * 0.2 * 6**0.5 * newton_schulz(p.grad, dtype=dtype)
    torch.testing.assert_close(p.detach(), wanted, rtol=1e-6, atol=1e-7)


def test_it_takes_a_state_from_before_it_had_a_type():
    params = [nn.Parameter(torch.randn(5, 4))]
    optimizer = Muon(params, lr=0.1)
    trained(optimizer, params)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["dtype"]
    optimizer.load_state_dict(state)
    trained(optimizer, params)


def test_parameters_of_one_shape_move_as_each_would_alone():
    together = [nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    alone = copy.deepcopy(together)
    trained(Muon(together, lr=0.1), together)
    optimizers = [Muon([p], lr=0.1) for p in alone]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p, optimizer in zip(alone, optimizers, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_stack_is_as_many_matrices():
    stack = nn.Parameter(torch.randn(3, 6, 4, dtype=torch.float64))
    start, grad = stack.detach().clone(), torch.randn(3, 6, 4, dtype=torch.float64)
    stack.grad = grad
    Muon([{"params": [stack], "stacked": True}], lr=0.1).step()
    for before, after, g in zip(start, stack.detach(), grad, strict=True):
        expected = before - 0.1 * 0.2 * 6**0.5 * newton_schulz(g)
        torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-10)


def test_a_parameter_without_a_gradient_stays():
    params = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))]
    before = copy.deepcopy(params)
    optimizer = Muon(params)
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(params, before, strict=True))
    assert not optimizer.state


def test_it_goes_on_to_the_bit_from_its_state():
    params = [nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))]
    optimizer = Muon(params, lr=0.1)
    trained(optimizer, params)
    again = copy.deepcopy(params)
    other = Muon(again, lr=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, own in ((optimizer, params), (other, again)):
        trained(one, own)
    assert all(a.equal(b) for a, b in zip(params, again, strict=True))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"steps": 0}, "steps"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"dtype": torch.int32}, "dtype"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=f"^Muon: {named}=.*; use "):
        Muon([nn.Parameter(torch.zeros(2, 2))], **settings)


def test_a_vector_is_no_matrix():
    optimizer = Muon([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"parameter 0 of a group is a vector .*matrices=False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "matrices": True})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused_by_name_before_anything_moves():
    model = nn.ModuleDict({"mix": nn.Linear(3, 3), "token": nn.Embedding(5, 3, sparse=True)})
    before = copy.deepcopy(model.state_dict())
    model["mix"](model["token"](torch.tensor([1]))).sum().backward()
    optimizer = Muon([{"params": [one]} for one in model.named_parameters()])
    with pytest.raises(RuntimeError, match=r"token\.weight has a sparse gradient.*sparse=False"):
        optimizer.step()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


def kinds(model, **settings):
    groups = muon_groups(model, **settings)
    found = {}
    for group in groups:
        kind = "stack" if group.get("stacked") else "muon" if group["matrices"] else "adam"
        found |= {name: kind for name, _ in group["params"]}
    return found


class Odd(nn.Module):
    """Positions, a stack of experts, a matrix of its own and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 4, 3))
        self.experts = nn.Parameter(torch.zeros(2, 4, 3))
        self.column = nn.Parameter(torch.zeros(4, 1))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.mix = nn.Parameter(torch.zeros(4, 3))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.LayerNorm((4, 3))
        self.hidden = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)


def test_hidden_matrices_are_told_from_all_others():
    assert kinds(Odd()) == {
        "positions": "adam",
        "experts": "stack",
        "column": "adam",
        "nothing": "adam",
        "mix": "muon",
        "norm.weight": "adam",
        "norm.bias": "adam",
        "hidden.weight": "muon",
        "hidden.bias": "adam",
        "head.weight": "adam",
        "head.bias": "adam",
    }
    assert kinds(Odd(), adam=["m?x"])["mix"] == "adam"


def test_a_head_that_shares_the_embedding_is_listed_once():
    model = nn.ModuleDict({"token": nn.Embedding(7, 4), "mix": nn.Linear(4, 4)})
    model["head"] = nn.Linear(4, 7, bias=False)
    model["head"].weight = model["token"].weight
    assert kinds(model) == {"token.weight": "adam", "mix.weight": "muon", "mix.bias": "adam"}


def test_of_convolutions_all_but_the_first_are_matrices():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.Flatten())
    found = kinds(model)
    assert found["0.weight"] == "adam"
    assert found["2.weight"] == "muon"
    assert found["1.weight"] == "adam"


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_weights_of_recurrent_layers_are_matrices(kind):
    found = kinds(nn.Sequential(kind(3, 4), nn.Linear(4, 2)))
    assert found["0.weight_ih_l0"] == found["0.weight_hh_l0"] == "muon"
    assert found["0.bias_hh_l0"] == "adam"


METHODS = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "rank-dad": og.RankDAD(rank=2),
    "local": og.LocalSteps(k=2),
    "reset": og.LocalSteps(k=1, method=og.RankDAD(rank=2), error_reset=True),
    "signs": og.LocalSteps(
        k=1,
        method=og.Sparse(density=0.3, select="random", wire=og.wire.Sign(), always=True),
        error_reset=True,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_sites_that_train_by_muon_stay_equal(name):
    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        before = copy.deepcopy(model.state_dict())
        session = og.distribute(model, METHODS[name], group=group)
        optimizer = Muon(muon_groups(model), lr=0.01)
        for step in range(4):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        session.flush()
        session.detach()
        return before, model.state_dict()

    (before, first), (_, second) = run_ranks(2, body)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-6, atol=1e-6)
        assert not value.equal(before[key])
