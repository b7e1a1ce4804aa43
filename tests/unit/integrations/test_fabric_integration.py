"""A loop around Lightning's Fabric, in two processes: with its DDP strategy, and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outergrad as og
from cases import mlp, relative_error
from spawned import run_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

METHODS: dict[str, Any] = {"default": None, "rank-dad": og.RankDAD(rank=64)}
STEPS = 6


def _trained(strategy: Any, file: Path) -> dict[str, Tensor]:
    """Two passes per step, the first of them unshared; saved and loaded by Fabric half-way."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    plain = mlp(6, 12, 3)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    rows = torch.randn(
        STEPS, 2, 5, 6, generator=torch.Generator().manual_seed(1 + fabric.global_rank)
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(model(rows[step, part]).square().mean())
        optimizer.step()
        if step == STEPS // 2:
            fabric.save(file, {"model": model, "optimizer": optimizer})
            fabric.load(file, {"model": model, "optimizer": optimizer})
    return {name: p.detach().clone() for name, p in plain.named_parameters()}


def _both(folder: Path) -> list[tuple[str, dict[str, Tensor]]]:
    from outergrad.integrations.fabric import OutergradStrategy

    found = [("ddp", _trained("ddp", folder / "ddp.pt"))]
    for name, method in METHODS.items():
        found.append((name, _trained(OutergradStrategy(method), folder / f"{name}.pt")))
    return found


def test_a_loop_of_fabrics_goes_as_with_its_ddp(tmp_path):
    for (_, by_ddp), *ours in run_two(_both, tmp_path):
        for method, found in ours:
            for name, p in by_ddp.items():
                assert relative_error(found[name], p.double()) < 1e-4, (method, name)


def _refusal(folder: Path) -> str:
    from lightning.fabric import Fabric

    from outergrad.integrations.fabric import OutergradStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=OutergradStrategy(og.Dense()))
    fabric.launch()
    with pytest.raises(TypeError) as refused:
        fabric.strategy._backward_sync_control.no_backward_sync(mlp(2, 2), enabled=True)
    return str(refused.value)


def test_another_model_is_refused(tmp_path):
    for told in run_two(_refusal, tmp_path):
        assert "fabric.setup" in told
