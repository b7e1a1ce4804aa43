"""Programs written for PyTorch's DistributedDataParallel: one changed import, or three lines."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import SCRIPTS, STEPS, ThreeLines, named, run
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import outergrad as og
from ranks import run_on_lasting_groups

SITES = 2
WAYS = ["one import", "three lines"]
PROGRAMS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            "MetaTensor" in name and find_spec("monai") is None, reason="MONAI is not installed"
        ),
    )
    for name in SCRIPTS
]
EXACT = {"dense": og.Dense(), "dad": og.DAD(), "dad always": og.DAD(always=True)}
Found = list[tuple[list[float], dict[str, Tensor]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Losses and weights of a script by a method; by PyTorch's class without one."""
    known: dict[tuple[str, str, str], Found] = {}

    def of(script: str, name: str, method: Any = None, way: str = "") -> Found:
        if (script, name, way) not in known:
            torch.manual_seed(0)
            models = SCRIPTS[script].build()

            def site(rank: int, group: Any) -> tuple[list[float], dict[str, Tensor]]:
                kind = partial(TorchDDP, process_group=group, find_unused_parameters=True)
                if way == "three lines":
                    kind = partial(ThreeLines, method=method, group=group)
                elif method is not None:
                    kind = partial(og.DistributedDataParallel, process_group=group, method=method)
                folder: Path = tmp_path_factory.mktemp("saved")
                return run(SCRIPTS[script], models, kind, rank, folder)

            known[script, name, way] = run_on_lasting_groups(SITES, site)
        return known[script, name, way]

    return of


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of a parameter, over the largest number of all."""
    most = max(t.abs().max().item() for t in other.values())
    return max((one[name] - t).abs().max().item() for name, t in other.items()) / most


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", PROGRAMS)
def test_dense_is_pytorchs_class_to_the_bit(found, script, way):
    for (losses, weights), (others, theirs) in zip(
        found(script, "dense", EXACT["dense"], way), found(script, "ddp"), strict=True
    ):
        assert losses == others
        assert all(torch.equal(weights[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("method", [name for name in EXACT if name != "dense"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", PROGRAMS)
def test_dad_is_pytorchs_class_but_for_rounding(found, script, way, method):
    for (_, weights), (_, theirs) in zip(
        found(script, method, EXACT[method], way), found(script, "ddp"), strict=True
    ):
        assert distance(weights, theirs) < 2e-3


@pytest.mark.filterwarnings("ignore:.*weights were loaded that were saved")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("script", PROGRAMS)
def test_low_rank_trains_and_replicas_stay_equal(found, script, way):
    """A program that saves with `torch.save` alone is told of what it loses."""
    sites = found(script, "rank-dad", og.RankDAD(rank=2), way)
    (_, first), (_, second) = sites
    assert all(torch.equal(second[name], t) for name, t in first.items())
    torch.manual_seed(0)
    before = named(SCRIPTS[script].build())
    assert any(not torch.equal(first[name], t) for name, t in before.items())
    for losses, _ in sites:
        assert len(losses) == STEPS
        assert all(map(isfinite, losses))
