"""What was applied and what is owed is the sum of all gradients, whatever happens in between."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from examples.signs import Signs
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from covering import LONG, rest_slow
from outergrad import wire
from outergrad.linalg.outer import formed
from ranks import run_on_lasting_groups

WIDTH = 40
METHODS: dict[str, Any] = {
    "rank-dad": og.RankDAD(rank=1),
    "rank-dad, a matrix": og.RankDAD(rank=1, error_feedback="dense"),
    "rank-dad, sums": og.RankDAD(rank=1, reduce="all_reduce"),
    "rank-dad, sides in turn": og.RankDAD(rank=1, reduce="alternate"),
    "rank-dad, sides in turn, a matrix": og.RankDAD(
        rank=1, reduce="alternate", error_feedback="dense", tolerance=0.5
    ),
    "rank-dad, two ways": og.RankDAD(rank=1, reduce="two_way"),
    "exact rows in bytes": og.RankDAD(rank=1, min_ratio=1e9, wire=wire.Int8()),
    "four bits": og.RankDAD(rank=2, min_ratio=1e9, wire=wire.Int4()),
    "three bits, two ways": og.RankDAD(rank=1, reduce="two_way", wire=wire.Int3()),
    "two bits, a matrix": og.RankDAD(rank=1, error_feedback="dense", wire=wire.Int2()),
    "vectors": og.RankDAD(rank=1, vectors=wire.Int4()),
    "vectors beside exact rows": og.RankDAD(rank=1, min_ratio=1e9, vectors=wire.Int2()),
    "vectors, two ways": og.RankDAD(rank=1, reduce="two_way", vectors=wire.Int4()),
    "all in four bits": og.RankDAD(
        rank=2, error_feedback="dense", wire=wire.Int4(), vectors=wire.Int4()
    ),
    "budget": og.RankDAD(budget=7500),
    "budget, two ways": og.RankDAD(budget=7500, reduce="two_way", error_feedback="dense"),
    "powersgd": og.PowerSGD(rank=1),
    "sparse": og.Sparse(density=0.1),
    "sparse, fewer than pay at many sites": og.Sparse(density=0.3),
    "sparse, random": og.Sparse(density=0.1, select="random"),
    "sparse, random, in signs": og.Sparse(
        density=0.3, select="random_blocks", block=4, wire=wire.Sign(), vectors=wire.Sign()
    ),
    "sparse, random, in signs, two ways": og.Sparse(
        density=0.3,
        select="random_blocks",
        block=4,
        wire=wire.Sign(),
        vectors=wire.Sign(),
        reduce="two_way",
    ),
    "signs": Signs(),
    "schedule": og.Schedule(
        {0: og.Sparse(density=0.3), 2: og.RankDAD(rank=1), 5: og.DAD(), 7: og.Sparse(density=0.1)}
    ),
}
QUICK = ("rank-dad", "rank-dad, sums", "rank-dad, two ways", "vectors", "sparse", "schedule")


class TwoHeads(nn.Module):
    """Of which a step uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 30), nn.Linear(WIDTH, 35)])

    def forward(self, x: Tensor, heads: tuple[int, ...]) -> Tensor:
        inside = self.body(x)
        return torch.cat([self.heads[k](inside) for k in heads], 1)


torch.manual_seed(2)
START = TwoHeads()
Step = tuple[list[Tensor], tuple[int, ...]]
"""A batch per site, and the heads that it goes through."""


def drawn(seed: int) -> list[list[Step]]:
    """Stages of training at three of 1 to 4 sites, on batches of a row to many."""
    draw, tensors = random.Random(seed), torch.Generator().manual_seed(seed)
    stages = []
    for sites in draw.sample([1, 2, 3, 4], 4 if LONG else 3):
        batches = [
            [torch.randn(draw.choice([1, 2, 60]), WIDTH, generator=tensors) for _ in range(sites)]
            for _ in range(3)
        ]
        stages.append([(batch, draw.choice([(0,), (0, 1), (1,)])) for batch in batches])
    return stages


def backward(model: nn.Module, x: Tensor, heads: tuple[int, ...]) -> None:
    (model(x, heads) ** 2).mean().backward()


def trained(
    method: Any, stages: list[list[Step]], **settings: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """All that was applied, and what the sites of the last stage owe, a part of the mean each."""
    applied = {name: torch.zeros_like(p.double()) for name, p in START.named_parameters()}
    states: list[Any] = []
    owed: list[dict[str, Tensor]] = []

    def body(rank: int, group: Any, steps: list[Step]) -> Any:
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group, **settings)
        if states:
            session.load_state_dict(states)
        found = []
        for batches, heads in steps:
            model.zero_grad()
            backward(model, batches[rank], heads)
            found.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
        owed = owed_by(session, group.size())
        state = session.state_dict()
        session.detach()
        return found, state, owed

    for steps in stages:
        sites = len(steps[0][0])
        results = run_on_lasting_groups(sites, lambda rank, group, s=steps: body(rank, group, s))
        for gradients in results[0][0]:
            for name, gradient in gradients.items():
                applied[name] += gradient
        states, owed = [state for _, state, _ in results], [part for _, _, part in results]
    return applied, owed


def owed_by(session: Any, sites: int) -> dict[str, Tensor]:
    owed = {name: torch.zeros_like(p.double()) for name, p in START.named_parameters()}
    for compressor, units in session._exchange.compressors.items():
        places = {m.place: m for unit in units for m in (*unit.slots, *unit.matrices)}
        for slot in places.values():
            if (residual := compressor.residual(slot)) is not None:
                owed[slot.weight] += formed(residual).view_as(owed[slot.weight]) / sites
    return owed


def pooled(stages: list[list[Step]]) -> dict[str, Tensor]:
    """The sum of the mean gradients of all steps, by autograd in float64."""
    model = copy.deepcopy(START).double()
    whole = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batches, heads in (step for steps in stages for step in steps):
        model.zero_grad()
        for x in batches:
            backward(model, x.double(), heads)
        for name, p in model.named_parameters():
            whole[name] += 0 if p.grad is None else p.grad / len(batches)
    return whole


@pytest.mark.parametrize("seed", range(12 if LONG else 1))
@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_through_any_sizes_methods_and_numbers_of_sites(name, seed):
    stages = drawn(100 * seed + [*METHODS].index(name))
    applied, owed = trained(METHODS[name], stages)
    for weight, expected in pooled(stages).items():
        found = applied[weight] + sum(part[weight] for part in owed)
        assert relative_error(found, expected) < 1e-5, weight


def batches(sites: int, rows: int, count: int) -> list[Step]:
    tensors = torch.Generator().manual_seed(9)
    steps = [
        [torch.randn(rows, WIDTH, generator=tensors) for _ in range(sites)] for _ in range(count)
    ]
    return [(step, (0, 1)) for step in steps]


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_a_site_that_is_left_alone_pays_all(name):
    """Nothing is compressed there: what three sites had not sent is in its first gradient."""
    stages = [batches(3, 20, 2), batches(1, 20, 1)]
    applied, owed = trained(METHODS[name], stages)
    assert not any(part.any() for one in owed for part in one.values())
    for weight, expected in pooled(stages).items():
        assert relative_error(applied[weight], expected) < 1e-5, weight


def test_rows_that_no_longer_pay_carry_what_was_lost_of_those_that_did():
    method = METHODS["exact rows in bytes"]
    few = [batches(2, 1, 3)]
    assert any(part.any() for one in trained(method, few)[1] for part in one.values())
    stages = [few[0] + batches(2, 60, 3)]
    applied, owed = trained(method, stages)
    assert not any(part.any() for one in owed for part in one.values())
    for name, expected in pooled(stages).items():
        assert relative_error(applied[name], expected) < 1e-5, name


def test_a_step_that_does_not_count_keeps_what_is_owed():
    """Of three steps the second, in which what is owed would have arrived, is skipped."""
    few, bad, good = batches(2, 1, 1), batches(2, 60, 1), batches(2, 60, 1)
    bad[0][0][1].fill_(float("nan"))
    applied, owed = trained(METHODS["exact rows in bytes"], [few + bad + good], max_bad_steps=3)
    assert not any(part.any() for one in owed for part in one.values())
    for name, expected in pooled([few + good]).items():
        assert relative_error(applied[name], expected) < 1e-5, name
