"""Layers and parameters without elements, and buffers alone, by every method."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from test_all_methods import EXACT, METHODS
from torch import nn

import outergrad as og
from cases import relative_error
from covering import covering
from ranks import run_on_lasting_groups
from sites_apart import FULL_RANK

WITHOUT = {
    "no rows in a table": lambda: nn.Embedding(0, 8),
    "no columns in a table": lambda: nn.Embedding(5, 0),
    "bags of no table": lambda: nn.EmbeddingBag(0, 8, mode="sum"),
    "no inputs": lambda: nn.Linear(0, 8),
    "no outputs": lambda: nn.Linear(8, 0),
    "no outputs, no bias": lambda: nn.Linear(8, 0, bias=False),
    "neither": lambda: nn.Linear(0, 0),
    "no inputs of a convolution": lambda: nn.Conv1d(0, 4, 3),
    "no inputs of a convolution in 2-D": lambda: nn.Conv2d(0, 4, 3),
    "no inputs of a cell": lambda: nn.GRUCell(0, 8),
    "a norm over nothing": lambda: nn.LayerNorm(0),
}
OTHERS = {
    "dense": og.Dense(),
    "auto": og.Auto(),
    "every second": og.Dense(every=2),
    "budget": og.RankDAD(budget=4000),
    "two methods": og.PerLayer({"first.*": og.RankDAD(rank=2), "*": og.DAD()}),
    **{
        f"local steps, {name}": og.LocalSteps(1, method=method)
        for name, method in FULL_RANK.items()
        if not isinstance(method, og.PerLayer)
    },
}
SITES = 2


class Net(nn.Module):
    """A layer without elements between two others, and a parameter without any."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(8, 8), part, nn.Linear(8, 8)
        self.nothing = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        y = self.last(self.first(x).tanh())
        return y.square().mean() + self.through(x).sum() + self.nothing.sum()

    def through(self, x):
        part, dtype = self.part, x.dtype
        if isinstance(part, nn.EmbeddingBag):
            return part(torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        if isinstance(part, nn.Embedding):
            return part(torch.zeros(part.num_embeddings and 2, dtype=torch.long))
        if isinstance(part, nn.LayerNorm | nn.GRUCell):
            return part(torch.ones(2, 0, dtype=dtype))
        if isinstance(part, nn.Linear):
            return part(torch.ones(4, part.in_features, dtype=dtype))
        return part(torch.ones(2, 0, *[5] * (part.weight.dim() - 2), dtype=dtype))


def batch(rank, step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def kept(net, x):
    net.zero_grad()
    net(x).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*weights were loaded")  # the same in every step
@pytest.mark.parametrize(
    ("name", "part"), covering([*METHODS, *OTHERS], list(WITHOUT), quick=16, every=8)
)
def test_what_has_no_elements_is_shared_as_the_rest(name, part):
    method = {**METHODS, **OTHERS}[name]
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # "Initializing zero-element tensors"
        original = Net(WITHOUT[part]())

    def body(rank, group):
        net = copy.deepcopy(original)
        session = og.distribute(net, method, group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for step in range(4):
            found.append(kept(net, batch(rank, step)))
            optimizer.step()
            net.load_state_dict(original.state_dict())
        assert "part" in str(session.coverage()) or not list(net.part.parameters())
        session.stats()
        session.load_state_dict(session.state_dict())
        session.flush()
        session.detach()
        return found

    results = run_on_lasting_groups(SITES, body)
    if name in EXACT or name in ("dense", "auto"):
        whole = copy.deepcopy(original).double()
        for step in range(4):
            own = [kept(whole, batch(rank, step).double()) for rank in range(SITES)]
            means = {n: sum(gradients[n] for gradients in own) / SITES for n in own[0]}
            for found in results:
                assert found[step].keys() == means.keys()
                for n, mean in means.items():
                    assert found[step][n].shape == mean.shape
                    assert not mean.numel() or relative_error(found[step][n], mean) < 1e-5


def test_buffers_alone_may_be_each_site_s_own():
    def body(rank, group):
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False), nn.BatchNorm1d(8))
        method = og.PerLayer({"1.running_*": og.Local(), "*": og.DAD()})
        session = og.distribute(net, method, group=group)
        net(10 * rank + batch(rank, 0)).square().mean().backward()
        own = session.own_names
        session.detach()
        return own, dict(net.named_buffers())

    (own, ours), (_, theirs) = run_on_lasting_groups(2, body)
    assert own == {"1.running_mean", "1.running_var"}
    assert not ours["1.running_mean"].equal(theirs["1.running_mean"])
    assert ours["2.running_mean"].equal(theirs["2.running_mean"])


@pytest.mark.parametrize(
    ("pattern", "method", "told"),
    [
        ("1.running_*", og.Dense(), "matches buffers alone, which og.Local"),
        ("1.run", og.Local(), "matches no parameter"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused(pattern, method, told):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def body(rank, group):
        with pytest.raises(ValueError, match=told):
            og.distribute(net, og.PerLayer({pattern: method, "*": og.DAD()}), group=group)

    run_on_lasting_groups(1, body)
