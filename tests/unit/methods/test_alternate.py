"""Sketches whose sides take turns: what comes out, what is owed, how little travels, and when."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import relative_error
from outergrad.linalg.outer import formed
from outergrad.linalg.power import gaussian_probe
from ranks import run_on_lasting_groups, run_ranks

WIDTHS = 60, 50
METHODS = {
    "factored": og.RankDAD(rank=4, reduce="alternate"),
    "dense": og.RankDAD(rank=4, reduce="alternate", error_feedback="dense"),
    "in few bits": og.RankDAD(rank=4, reduce="alternate", error_feedback="auto"),
    "nothing kept": og.RankDAD(rank=4, reduce="alternate", error_feedback=None),
    "bf16": og.RankDAD(rank=4, reduce="alternate", wire=og.wire.BF16()),
    "tolerance": og.RankDAD(rank=4, reduce="alternate", tolerance=0.2),
}
by_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
torch.manual_seed(0)
LAYER = nn.Linear(*WIDTHS)
DIRECTIONS, EIGHT = torch.randn(4, 60), torch.randn(8, 60)


def rows(site: int, step: int, count: int = 30) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    return torch.randn(count, 60, generator=generator) * torch.arange(1, 61) ** -0.8


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def mean_gradient(xs: list[Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(LAYER).double()
    sites = [gradients(model, x.double()) for x in xs]
    return {name: sum(g[name] for g in sites) / len(sites) for name in sites[0]}


class Site:
    """One of several, whose layer stays where it is."""

    def __init__(self, method: Any, rank: int, group: Any) -> None:
        self.model, self.rank = copy.deepcopy(LAYER), rank
        self.session = og.distribute(self.model, method, group=group)

    def step(self, x: Tensor) -> dict[str, Tensor]:
        return gradients(self.model, x)

    @property
    def owed(self) -> Tensor:
        ((compressor, (unit,)),) = self.session._exchange.compressors.items()
        residual = compressor.residual(unit.slots[0])
        return torch.zeros(50, 60) if residual is None else formed(residual)[0]


def trained(method: Any, sites: int, steps: int, batch: Any = rows) -> list[Any]:
    """Per site, the gradients of every step, what it owes in the end, and all bytes."""

    def body(rank: int, group: Any) -> Any:
        site = Site(method, rank, group)
        found, sent = [], []
        for step in range(steps):
            found.append(site.step(batch(rank, step)))
            sent.append(site.session.stats().sent_bytes)
        return found, site.owed, sent

    return run_on_lasting_groups(sites, body)


@pytest.mark.parametrize("sites", [2, 3])
@by_method
@pytest.mark.usefixtures("large_matrices")
def test_all_sites_have_the_same_and_vectors_are_exact(method, sites):
    (first, _, _), *others = trained(method, sites, 4)
    for step, found in enumerate(first):
        exact = mean_gradient([rows(site, step) for site in range(sites)])
        assert all(g.equal(other[0][step][n]) for other in others for n, g in found.items())
        assert relative_error(found["bias"], exact["bias"]) < 5e-6
        assert torch.linalg.matrix_rank(found["weight"]) <= 4


@by_method
@pytest.mark.usefixtures("large_matrices")
def test_a_gradient_of_the_rank_is_reproduced(method):
    """All rows of all steps lie in four directions: once these are found, nothing is missed."""

    def batch(site: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + site)
        return torch.randn(30, 4, generator=generator) @ DIRECTIONS

    plain = og.RankDAD(**{**vars(method), "error_feedback": None})
    limit = 1e-2 if method.wire else 1e-5
    exact = mean_gradient([batch(site, 4) for site in range(2)])["weight"]
    for found, _, _ in trained(plain, 2, 5, batch):
        assert relative_error(found[4]["weight"], exact) < max(limit, method.tolerance)


def test_on_one_batch_the_error_becomes_the_best_of_the_rank():
    """Two steps are an iteration from where the last ones ended."""
    exact = mean_gradient([rows(site, 0) for site in range(2)])["weight"]
    best = torch.linalg.svdvals(exact)[4:].norm().item()
    found, _, _ = trained(METHODS["nothing kept"], 2, 16, lambda site, _: rows(site, 0))[0]
    errors = [(g["weight"].double() - exact).norm().item() for g in found]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(errors))
    assert errors[-1] < 1.05 * best


def acp_sgd(gradients_TS: list[list[Tensor]], q_IK: Tensor) -> list[Tensor]:
    """What is applied in each step, by the formulas of the paper: of formed gradients, float64."""
    owed_S = [torch.zeros_like(g) for g in gradients_TS[0]]
    applied, factor = [], q_IK
    for step, gradients_S in enumerate(gradients_TS):
        due_S = [g + owed for g, owed in zip(gradients_S, owed_S, strict=True)]
        if step % 2:
            due_S = [due.T for due in due_S]
        basis = torch.linalg.qr(factor).Q
        own_S = [due @ basis for due in due_S]
        owed_S = [due - own @ basis.T for due, own in zip(due_S, own_S, strict=True)]
        factor = sum(own_S[1:], own_S[0]) / len(own_S)
        mean = factor @ basis.T
        if step % 2:
            owed_S, mean = [owed.T for owed in owed_S], mean.T
        applied.append(mean)
    return applied


@pytest.mark.parametrize("sites", [2, 3])
def test_it_is_acp_sgd(sites):
    """Which an independent few lines of formulas say, in float64."""
    steps = 7
    gradients_TS = [
        [mean_gradient([rows(site, step)])["weight"] for site in range(sites)]
        for step in range(steps)
    ]
    expected = acp_sgd(gradients_TS, gaussian_probe(60, 4))
    found = trained(METHODS["dense"], sites, steps)[0][0]
    for step in range(steps):
        assert relative_error(found[step]["weight"], expected[step]) < 2e-5, step


@pytest.mark.parametrize("feedback", ["factored", "dense"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_what_is_applied_and_owed_is_all_there_was(feedback, steps):
    """Of a small matrix all is remembered, whatever the memory."""
    results = trained(og.RankDAD(rank=2, reduce="alternate", error_feedback=feedback), 3, steps)
    applied = sum(found["weight"].double() for found in results[0][0])
    owed = sum(owed.double() for _, owed, _ in results) / 3
    whole = sum(
        mean_gradient([rows(site, step) for site in range(3)])["weight"] for step in range(steps)
    )
    assert owed.norm() > 0.01 * whole.norm()
    assert relative_error((applied + owed).float(), whole) < 1e-5


@pytest.mark.usefixtures("large_matrices")
def test_a_memory_in_factors_pays_what_it_holds():
    """A gradient, once, then rows of zeros: with directions enough all of it arrives in time."""
    method = og.RankDAD(rank=4, reduce="alternate", feedback_rank=8)

    def batch(site: int, step: int) -> Tensor:
        few = torch.randn(30, 8, generator=torch.Generator().manual_seed(site)) @ EIGHT
        return few if step < 2 else torch.zeros(30, 60)

    exact = 2 * mean_gradient([batch(site, 0) for site in range(2)])["weight"]
    results = trained(method, 2, 30, batch)
    applied = sum(found["weight"].double() for found in results[0][0])
    assert relative_error(applied, exact) < 1e-4


@pytest.mark.parametrize("sites", [2, 3])
def test_a_step_sends_one_side_and_the_bias(sites):
    """To the byte, besides votes: the side of the outputs, then that of the inputs."""

    def body(rank: int, group: Any) -> list[int]:
        site, sent = Site(METHODS["dense"], rank, group), []
        for step in range(8):
            site.step(rows(rank, step))
            sent.append(site.session.stats().sent_bytes)
        site.session.detach()
        return sent

    votes, states = 72 * (sites - 1), 2
    bias = 50
    sides = [2 * (sites - 1) * 4 * (4 * width + bias + states) // sites for width in (50, 60)]
    for sent in run_ranks(sites, body):  # on a group of its own, where headers are left out
        assert sent[4:] == 2 * [side + votes for side in sides]


def test_the_rank_follows_the_tolerance():
    exact = mean_gradient([rows(site, 0) for site in range(2)])["weight"]
    sent = {}
    for tolerance in (0.5, 0.05):
        settings = {"tolerance": tolerance, "error_feedback": None}
        method = og.RankDAD(rank=16, reduce="alternate", **settings)
        found, _, all_sent = trained(method, 2, 24, lambda site, _: rows(site, 0))[0]
        sent[tolerance] = sum(all_sent[-2:])
        assert relative_error(found[-1]["weight"], exact) < tolerance
    assert sent[0.5] < 0.5 * sent[0.05]


@by_method
def test_not_a_number_is_seen_everywhere_and_forgotten(method):
    """A bad batch of one site shows at all of them, spoils no later step and turns no side."""

    def batch(site: int, step: int) -> Tensor:
        return rows(site, step) * (float("nan") if (site, step) == (1, 2) else 1.0)

    for found, _, _ in trained(method, 2, 5, batch):
        assert not found[2]["weight"].isfinite().all()
        assert all(found[step]["weight"].isfinite().all() for step in (0, 1, 3, 4))


def test_a_void_step_turns_no_side():
    """What follows is to the bit as if it had not been."""

    def body(rank: int, group: Any, bad: int | None) -> list[dict[str, Tensor]]:
        model, found = copy.deepcopy(LAYER), []
        settings = {"group": group, "max_bad_steps": 3}
        session = og.distribute(model, METHODS["dense"], **settings)
        for step in range(5):
            if step == bad:
                x = rows(rank, 9) * (float("inf") if rank else 1.0)
                model(x).square().mean().backward()
            found.append(gradients(model, rows(rank, step)))
        session.detach()
        return found

    for bad in (1, 2):
        smooth = run_on_lasting_groups(2, lambda rank, group: body(rank, group, None))
        found = run_on_lasting_groups(2, lambda rank, group, bad=bad: body(rank, group, bad))
        for ours, expected in zip(found[0], smooth[0], strict=True):
            assert all(g.equal(expected[name]) for name, g in ours.items())


def test_receives_are_posted_a_step_before_though_lengths_take_turns():
    def body(rank: int, group: Any) -> list[int]:
        site, ahead = Site(METHODS["dense"], rank, group), []
        for step in range(6):
            site.step(rows(rank, step))
            ahead.append(sum(map(len, site.session._at.comm._posted.values())))
        site.session.detach()
        return ahead

    assert run_ranks(2, body) == [[0, 1, 1, 1, 1, 1]] * 2


def test_coverage_and_refusals_name_it():
    def body(rank: int, group: Any) -> str:
        site = Site(METHODS["factored"], rank, group)
        site.step(rows(rank, 0))
        return str(site.session.coverage())

    assert "sketches" in run_on_lasting_groups(2, body)[0]
    for name, settings in {
        "wire": {"wire": og.wire.Int8()},
        "vectors": {"vectors": og.wire.Int4()},
    }.items():
        with pytest.raises(ValueError, match=rf"RankDAD: {name}=.*reduce='alternate' adds up"):
            og.RankDAD(reduce="alternate", **settings)
    with pytest.raises(ValueError, match=r"RankDAD: reduce='alternate'.*'gather' or 'two_way'"):
        og.RankDAD(reduce="alternate", budget="64kB")


FEW, MANY = 2, 40


@by_method
@pytest.mark.parametrize("counts", [[FEW], [FEW, FEW], [FEW, MANY, FEW]])
def test_batches_of_few_rows_between_others(method, counts):
    """Triplets of few rows are gathered, from directions of each site alone; sketches need common
    ones. All sites get the same mean, and training goes on."""
    steps = [MANY] * 3 + counts + [MANY] * 4 + counts + [MANY] * 3

    def body(rank: int, group: Any) -> list[dict[str, Tensor]]:
        site = Site(method, rank, group)
        found = [site.step(rows(rank, step, count)) for step, count in enumerate(steps)]
        site.session.detach()
        return found

    one, other = run_on_lasting_groups(2, body)
    for found, also in zip(one, other, strict=True):
        assert all(torch.equal(g, also[name]) for name, g in found.items())
