"""Gradients whose squares, or which themselves, are out of the range of float32 or float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from covering import rest_slow
from outergrad.core.coding import encode_all
from outergrad.core.types import Factors
from outergrad.linalg.compress import compress
from outergrad.linalg.selection import leading_blocks
from outergrad.methods.low_rank.memory import packed, unpacked
from ranks import run_on_lasting_groups
from watched import owed_by

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES, WIDTH, ROWS = 2, 64, 30
SCALES = [2.0**-1000, 2.0**-600, 2.0**600]

BY: dict[str, Any] = {
    f"{reduce}, {memory}": og.RankDAD(rank=2, reduce=reduce, error_feedback=memory)
    for reduce in ("gather", "two_way", "alternate", "all_reduce")
    for memory in ("factored", "dense", "auto", None)
} | {
    "tolerance": og.RankDAD(rank=4, tolerance=0.3, reduce="gather", error_feedback="dense"),
    "tolerance, nothing kept": og.RankDAD(rank=4, tolerance=0.3, error_feedback=None),
    "small core": og.RankDAD(rank=2, solver="small_core", error_feedback="dense"),
    "power": og.RankDAD(rank=4, tolerance=0.3, solver="power_iteration", error_feedback=None),
    "budget": og.RankDAD(budget=0.5, error_feedback="auto"),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
    "sparse": og.Sparse(density=0.1, always=True),
    "sparse, topk": og.Sparse(density=0.1, select="topk", always=True),
    "sparse, blocks": og.Sparse(density=0.1, select="blocks", block=4, always=True),
    "dad": og.DAD(always=True),
}
QUICK = (
    *("gather, factored", "two_way, dense", "alternate, auto", "all_reduce, None"),
    *("tolerance", "budget", "powersgd", "sparse", "dad"),
)
"""One of each kind."""

torch.manual_seed(0)
_NET = nn.Sequential(
    nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
)


def swept(by: Any, dtype: torch.dtype, scale: float) -> list[tuple[Tensor, Tensor]]:
    """Of each weight, what was applied over three steps and what is owed, divided by the scale."""

    def body(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = copy.deepcopy(_NET).to(dtype)
        session = og.distribute(model, by, group=group)
        applied: dict[str, Tensor] = {}
        for step in range(3):
            model.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(ROWS, WIDTH, generator=draw).to(dtype)
            share = torch.randn(ROWS, WIDTH, generator=draw).to(dtype)  # no gradient of rank one
            (model(x) * share * scale).sum().backward()
            for name, p in model.named_parameters():
                if p.dim() == 2:
                    assert p.grad is not None
                    applied[name] = applied.get(name, 0) + p.grad.double() / scale
        owed = {name: t / scale for name, t in owed_by(session).items()}
        session.detach()
        return applied, owed

    (applied, mine), (_, theirs) = run_on_lasting_groups(SITES, body)
    zeros = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    return [
        (t, (mine.get(n, zeros) + theirs.get(n, zeros)).view_as(t) / 2) for n, t in applied.items()
    ]


@pytest.mark.parametrize("name", rest_slow(BY, QUICK))
def test_float64_gradients_are_applied_and_owed_alike_at_every_scale(name):
    """Scales are powers of two: all is the same but for what is rounded."""
    usual = swept(BY[name], torch.float64, 1.0)
    for scale in SCALES:
        extreme = swept(BY[name], torch.float64, scale)
        for (applied, owed), (far_applied, far_owed) in zip(usual, extreme, strict=True):
            assert (applied - far_applied).norm() < 1e-6 * applied.norm(), scale
            assert (owed - far_owed).norm() < 1e-2 * applied.norm(), scale


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**70])
@pytest.mark.parametrize("by", [BY["all_reduce, dense"], BY["powersgd"]], ids=["ours", "powersgd"])
def test_sketches_start_from_the_directions_of_before_at_every_scale(by, scale):
    """Where squares leave float32's range, a start from random directions would find less."""
    usual, extreme = swept(by, torch.float32, 1.0), swept(by, torch.float32, scale)
    for (applied, _), (far_applied, _) in zip(usual, extreme, strict=True):
        assert (applied - far_applied).norm() < 1e-4 * applied.norm()


@pytest.mark.parametrize("scale", [1.0, *SCALES, 2.0**1020, 2.0**-1060])
def test_what_is_owed_in_few_bits_is_right_to_its_bits(scale):
    draw = torch.Generator().manual_seed(0)
    matrices = [torch.randn(1, 8, 64, generator=draw).double() for _ in range(2)]
    found = unpacked(packed([matrices[0] * scale, matrices[1]], 1))
    for t, again, factor in zip(matrices, found, (scale, 1.0), strict=True):
        assert (again / factor - t).norm() < 0.05 * t.norm()


@pytest.mark.parametrize("tolerance", [0.0, 0.3])
@pytest.mark.parametrize("solver", ["small_core", "subspace_iteration", "power_iteration"])
@pytest.mark.parametrize("scale", SCALES)
def test_solvers_find_the_same_triplets_and_error(scale, solver, tolerance):
    draw = torch.Generator().manual_seed(0)
    d, a = (torch.randn(1, 12, 20, generator=draw).double() for _ in range(2))
    d = d * torch.logspace(0, -3, 12)[None, :, None]
    usual = compress(Factors(d, a), 6, tolerance, solver=solver)
    extreme = compress(Factors(d * scale, a), 6, tolerance, solver=solver)
    assert extreme.rank == usual.rank > 0
    assert torch.allclose(extreme.sigma_GR / scale, usual.sigma_GR, rtol=1e-9)
    if usual.relative_error is not None:
        assert extreme.relative_error == pytest.approx(usual.relative_error, rel=1e-6)
        assert extreme.rank_within(0.5) == usual.rank_within(0.5)


@pytest.mark.parametrize("scale", SCALES)
def test_blocks_are_chosen_by_their_norms(scale):
    flat = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    assert torch.equal(leading_blocks(flat * scale, 16, 4), leading_blocks(flat, 16, 4))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    "codec",
    [og.wire.BF16(), og.wire.Int8(), og.wire.Int4(), og.wire.Int2(), og.wire.Sign()],
    ids=repr,
)
def test_codecs_refuse_float64_numbers_that_they_cannot_write(codec, scale):
    with pytest.raises(ValueError, match="writes numbers in the range of float32"):
        encode_all((codec,), [torch.ones(1, 2, 64, dtype=torch.float64) * scale])
