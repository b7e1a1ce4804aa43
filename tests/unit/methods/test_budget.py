"""A budget of bytes per step: kept, used, shared out by what triplets are worth, and lossless."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from covering import covering
from outergrad.linalg.outer import formed
from outergrad.wire import Int4
from ranks import run_on_lasting_groups

WIDTH, STEPS = 64, 5


class Model(nn.Module):
    """A layer whose gradient has rank two, others that need more, a table and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH)
        self.few, self.many = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.table(ids)] * 2, -1)
        thin = torch.cat([x[..., :2], torch.zeros_like(x[..., 2:])], -1)
        return self.last(torch.tanh(self.many(self.norm(self.few(thin) + x[..., :WIDTH]))))


torch.manual_seed(0)
START = Model()
IDS = [[torch.randint(50, (60 + 9 * step,)) for step in range(STEPS)] for _ in range(4)]
TARGETS = [[torch.randint(40, ids.shape) for ids in site] for site in IDS]
BUDGET = 22_000
"""Bytes, to each other site."""
METHODS: dict[str, Any] = {
    "float32": og.RankDAD(budget=BUDGET),
    "dense memory": og.RankDAD(budget=BUDGET, error_feedback="dense"),
    "few bits": og.RankDAD(budget=12_000, wire=Int4(), vectors=Int4(), error_feedback="dense"),
    "vectors": og.RankDAD(budget=BUDGET, vectors=Int4()),
    "shared out in every step": og.RankDAD(
        budget=12_000, share_every=1, wire=Int4(), vectors=Int4(), error_feedback="auto"
    ),
    "two ways": og.RankDAD(budget=BUDGET, reduce="two_way"),
    "two ways, dense memory": og.RankDAD(
        budget=BUDGET, reduce="two_way", error_feedback="dense", vectors=Int4()
    ),
    "two ways, few bits": og.RankDAD(
        budget=12_000, reduce="two_way", wire=Int4(), vectors=Int4(), error_feedback="dense"
    ),
}


def step(model: nn.Module, rank: int, k: int) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(IDS[rank][k]), TARGETS[rank][k]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def owed(session: Any, sites: int) -> dict[str, Tensor]:
    whole = {name: torch.zeros_like(p).double() for name, p in START.named_parameters()}
    for compressor, units in session._exchange.compressors.items():
        for slot in {m.place: m for unit in units for m in unit.matrices}.values():
            if (residual := compressor.residual(slot)) is not None:
                whole[slot.weight] += formed(residual).view_as(whole[slot.weight]) / sites
    return whole


@pytest.mark.parametrize(("method", "sites"), covering(METHODS, [2, 3, 4], quick=3))
def test_no_byte_more_and_nothing_is_lost(method, sites):
    """Also while ranks change, on every site, by all that the session has sent."""
    copies = 2 * (sites - 1) / sites if method.reduce == "two_way" else sites - 1
    method = replace(method, budget=int(method.budget * copies))

    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        found = []
        for k in range(STEPS):
            found.append((step(model, rank, k), session.stats().sent_bytes))
        rows = {name: layer.kept_rows for name, layer in session.stats().layers.items()}
        return found, owed(session, sites), rows

    results = run_on_lasting_groups(sites, body)
    sent_KS = list(zip(*([nbytes for _, nbytes in found] for found, _, _ in results), strict=True))
    busiest = [max(sent_S) for sent_S in sent_KS]
    assert max(busiest) <= method.budget
    assert busiest[-1] > 0.9 * method.budget, busiest  # besides a header, which few steps have
    if method.reduce != "two_way":  # of owners, one may have a layer and another two
        assert min(map(min, sent_KS)) > 0.7 * method.budget, sent_KS
        assert min(sent_KS[-1]) > 0.9 * method.budget, sent_KS
    for _, _, rows in results:
        assert all(rows[f"{name}.weight"] >= 1 for name in ("table", "few", "many", "last"))
        assert rows["few.weight"] < rows["many.weight"]
    if method.error_feedback != "dense":
        return  # of a memory in directions some is lost
    reference = copy.deepcopy(START).double()
    due = [step(reference, rank, k) for rank in range(sites) for k in range(STEPS)]
    for name in due[0]:
        applied = sum(gradients[name].double() for gradients, _ in results[0][0])
        whole = applied + sum(part[name] for _, part, _ in results)
        assert relative_error(whole, sum(g[name] for g in due) / sites) < 1e-5, name


@pytest.mark.parametrize(
    ("reduce", "sites", "others", "settings"),
    covering(
        ["gather", "two_way"],
        [2, 4],
        {"dense": og.Dense(), "owners": og.RankDAD(rank=2, reduce="two_way"), "none": None},
        {"short messages": {"bucket_bytes": 1 << 10}, "vectors": {"vectors": Int4()}, "usual": {}},
        quick=8,
        every=2,
    ),
)
def test_no_byte_more_in_short_messages_or_beside_others(reduce, sites, others, settings):
    """Where what is dense goes along with rows, or has an owner, or both."""
    few = og.RankDAD(budget=30_000 * sites, reduce=reduce, **settings)
    method = few if others is None else og.PerLayer({"few.*": few, "many.*": few, "*": others})

    def body(rank, group):
        session = og.distribute(model := copy.deepcopy(START), method, group=group)
        return [(step(model, rank, k), session.stats().sent_bytes)[1] for k in range(STEPS)]

    sent = run_on_lasting_groups(sites, body)
    assert max(map(max, sent)) <= few.budget
    if others is None:  # a budget counts on others as if they were dense
        assert max(map(max, sent)) > 0.5 * few.budget


def test_owners_send_about_as_much_each_while_ranks_change():
    """No site sends more than the budget, or less than four fifths of it; all know who has what."""
    torch.manual_seed(1)
    widths = [64, 64, 128, 64, 64, 128, 64, 64, 64]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
    start = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    method = og.RankDAD(
        budget=20_000, reduce="two_way", wire=Int4(), vectors=Int4(), error_feedback="dense"
    )
    x = [torch.randn(100, 64) for _ in range(4)]

    def body(rank, group):
        session = og.distribute(model := copy.deepcopy(start), method, group=group)
        found = []
        for _ in range(12):
            model.zero_grad()
            model(x[rank]).square().mean().backward()
            ((compressor, _),) = session._exchange.compressors.items()
            budget = compressor._budget
            rows = [[budget.rows(m, site) for site in range(4)] for m in budget._matrices]
            owners = [budget.owner(m) for m in budget._matrices]
            found.append((session.stats().sent_bytes, rows, owners))
        return found

    results = run_on_lasting_groups(4, body)
    for sites in zip(*results, strict=True):
        sent, rows, owners = zip(*sites, strict=True)
        assert 0.8 * method.budget < min(sent) <= max(sent) <= method.budget
        assert all(of == rows[0] for of in rows)
        assert all(len(set(of_layer)) == 1 for of_layer in rows[0])
        assert all(of == owners[0] for of in owners)
    (_, first, _), *_, (_, last, _) = results[0]
    assert first != last


def test_layers_are_shared_out_less_and_less_often():
    """After 1, 2, 4, ... steps, so that most are alike: what was prepared is of use again."""

    def body(rank, group):
        model, method = copy.deepcopy(START), METHODS["few bits"]
        session = og.distribute(model, method, group=group)
        changed, before = list[int](), None
        for k in range(36):
            step(model, rank, k % STEPS)
            ((compressor, _),) = session._exchange.compressors.items()
            now = dict(compressor._budget._wanted)
            changed += [k + 1] * (now != before)
            before = now
        return changed

    for changed in run_on_lasting_groups(2, body):
        assert set(changed) <= {1, 2, 4, 8, 16, 32}
        assert len(changed) >= 3


def test_nothing_is_lost_once_few_directions_are_spare():
    """From the 17th step on layers iterate on fewer directions; all they miss is still owed."""
    steps, method = 20, METHODS["few bits"]

    def body(rank, group):
        session = og.distribute(model := copy.deepcopy(START), method, group=group)
        applied = [step(model, rank, k % STEPS) for k in range(steps)]
        ((compressor, _),) = session._exchange.compressors.items()
        budget, memories = compressor._budget, compressor._memories
        spare = [memories[m].q_GIR.shape[2] - budget.rows(m, rank) for m in budget._matrices]
        return applied, owed(session, 2), spare, [budget.rows(m, rank) for m in budget._matrices]

    results = run_on_lasting_groups(2, body)
    for _, _, spare, rows in results:
        assert all(s <= max(4, r // 4) for s, r in zip(spare, rows, strict=True))
    reference = copy.deepcopy(START).double()
    due = [step(reference, rank, k % STEPS) for rank in range(2) for k in range(steps)]
    for name in due[0]:
        whole = sum(gradients[name].double() for gradients in results[0][0])
        whole = whole + sum(part[name] for _, part, _, _ in results)
        assert relative_error(whole, sum(g[name] for g in due) / 2) < 1e-5, name


def test_shares_follow_each_step_where_that_is_asked_for():
    """A division looks at the step before alone: its energies are those of that step."""

    def body(rank, group):
        model, method = copy.deepcopy(START), METHODS["shared out in every step"]
        session = og.distribute(model, method, group=group)
        ((compressor, _),) = session._exchange.compressors.items()
        found = []
        for k in range(8):
            step(model, rank, k % STEPS)
            found.append((dict(compressor._budget._wanted), session.stats().sent_bytes))
        return found

    for found in run_on_lasting_groups(2, body):
        wanted, sent = zip(*found, strict=True)
        assert sum(now != before for before, now in itertools.pairwise(wanted)) > 4
        assert 0.5 * 12_000 < min(sent) <= max(sent) <= 12_000


@pytest.mark.parametrize(("method", "sites"), covering(METHODS, [2, 3], quick=4, every=2))
def test_training_goes_on_to_the_bit(method, sites):
    method = replace(method, budget=method.budget * (sites - 1))

    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, method, group=group)
        whole = [step(model, rank, k) for k in range(STEPS)]
        session.detach()
        session = og.distribute(model, method, group=group)
        begun = [step(model, rank, k) for k in range(3)]
        state = session.state_dict()
        session.detach()
        session = og.distribute(model, method, group=group)
        session.load_state_dict(state)
        return whole, [*begun, *(step(model, rank, k) for k in range(3, STEPS))]

    for whole, parts in run_on_lasting_groups(sites, body):
        for one, other in zip(whole, parts, strict=True):
            assert all(one[name].equal(other[name]) for name in one)


def test_what_cannot_be_is_refused():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"budget=100 is 100 bytes.*use that or more"):
            og.distribute(copy.deepcopy(START), og.RankDAD(budget=100), group=group)

    run_on_lasting_groups(2, body)
    with pytest.raises(ValueError, match=r"share_every=4; use it with budget= alone"):
        og.RankDAD(share_every=4)
    others = {"reduce": "all_reduce"}, {"budget": "much"}, {"share_every": 0}
    for wrong in ({"rank": 8}, {"tolerance": 0.1}, *others):
        with pytest.raises(ValueError, match="RankDAD: "):
            og.RankDAD(**({"budget": "160kB"} | wrong))


def test_messages_are_filled_alike_whatever_a_tolerance_asks_for():
    """Sites may plan in different steps, when each would see other ranks."""

    def body(rank, group):
        method = og.RankDAD(rank=8, tolerance=0.2)
        session = og.distribute(copy.deepcopy(START), method, group=group)
        ((compressor, units),) = session._exchange.compressors.items()
        matrices = [m for unit in units for m in unit.matrices if not (m.vector or m.lookup)]
        return [{compressor.payload_bytes(m, rows) for rows in (1, 3, 8)} for m in matrices]

    for sizes in run_on_lasting_groups(2, body):
        assert sizes
        assert all(len(of_ranks) == 1 for of_ranks in sizes)


@pytest.mark.parametrize(("budget", "nbytes"), [("1.6kB", 1600), (160, 160), (1 / 64, 1000)])
def test_budgets_are_bytes_or_a_fraction(budget, nbytes):
    assert og.RankDAD(budget=budget).budget_bytes(64_000) == nbytes
    assert og.RankDAD(budget="1/64").budget_bytes(64_000) == 1000
    assert math.isclose(og.RankDAD(budget=0.5).budget_bytes(1000), 500)
    assert repr(og.RankDAD(budget="1.6kB")) == "RankDAD(budget='1.6kB')"
