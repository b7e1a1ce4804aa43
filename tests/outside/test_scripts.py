"""Programs written for PyTorch's DistributedDataParallel, with one changed import."""

from __future__ import annotations

from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import SCRIPTS, STEPS, named, run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import outergrad as og
from ranks import run_on_lasting_groups

SITES = 2
EXACT = {"dense": og.Dense(), "dad": og.DAD(), "dad always": og.DAD(always=True)}
Found = list[tuple[list[float], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Losses and weights of a script by a method; by PyTorch's class without one."""
    known: dict[tuple[str, str], Found] = {}

    def of(script: str, name: str, method: Any = None) -> Found:
        if (script, name) not in known:
            torch.manual_seed(0)
            models = SCRIPTS[script].build()

            def site(rank: int, group: Any) -> tuple[list[float], dict[str, Tensor]]:
                kind = partial(TorchDDP, process_group=group, find_unused_parameters=True)
                if method is not None:
                    kind = partial(og.DistributedDataParallel, process_group=group, method=method)
                folder: Path = tmp_path_factory.mktemp("saved")
                return run(SCRIPTS[script], models, kind, rank, folder)

            known[script, name] = run_on_lasting_groups(SITES, site)
        return known[script, name]

    return of


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of a parameter, over the largest number of all."""
    most = max(t.abs().max().item() for t in other.values())
    return max((one[name] - t).abs().max().item() for name, t in other.items()) / most


@pytest.mark.parametrize("script", SCRIPTS)
def test_dense_is_pytorchs_class_to_the_bit(found, script):
    for (losses, weights), (others, theirs) in zip(
        found(script, "dense", EXACT["dense"]), found(script, "ddp"), strict=True
    ):
        assert losses == others
        assert all(torch.equal(weights[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("method", [name for name in EXACT if name != "dense"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_dad_is_pytorchs_class_but_for_rounding(found, script, method):
    for (_, weights), (_, theirs) in zip(
        found(script, method, EXACT[method]), found(script, "ddp"), strict=True
    ):
        assert distance(weights, theirs) < 2e-3


@pytest.mark.parametrize("script", SCRIPTS)
def test_low_rank_trains_and_replicas_stay_equal(found, script):
    sites = found(script, "rank-dad", og.RankDAD(rank=2))
    (_, first), (_, second) = sites
    assert all(torch.equal(second[name], t) for name, t in first.items())
    torch.manual_seed(0)
    before = named(SCRIPTS[script].build())
    assert any(not torch.equal(first[name], t) for name, t in before.items())
    for losses, _ in sites:
        assert len(losses) == STEPS
        assert all(map(isfinite, losses))
