"""The encoder's gradients, as sites share them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad_lab.data import Format, synthetic
from outergrad_lab.models import build_model
from ranks import run_ranks

DATA = synthetic(Format(shape=(9,), classes=3, tokens=True, vocabulary=40), rows=12, seed=0)
LENGTHS = 1 + torch.arange(12) % 9
IDS = DATA.x_train.clamp_min(1) * (torch.arange(9) < LENGTHS[:, None])
METHODS = {
    "dense": og.Dense(),
    "dAD": og.DAD(always=True),
    "dAD with activations": og.DAD(always=True, reveal="activations"),
    "edAD": og.EDAD(),
    "edAD by blocks": og.EDAD(blocks=["blocks.*"]),
}


def gradients(model: nn.Module, rows: range) -> dict[str, Tensor]:
    cross_entropy(model(IDS[rows]), DATA.y_train[rows]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def encoder() -> nn.Module:
    return build_model("encoder", DATA.format, (16,))


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_gradients_are_those_of_the_pooled_rows(sites, method):
    pooled = encoder()
    copies = [encoder() for _ in range(sites)]
    for copy in copies:
        copy.load_state_dict(pooled.state_dict())

    def body(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        session = og.distribute(copies[rank], method, group=group)
        size = len(IDS) // sites
        found = gradients(copies[rank], range(rank * size, (rank + 1) * size))
        session.detach()
        return found

    expected = gradients(pooled, range(len(IDS)))
    for found in run_ranks(sites, body):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            largest = max(gradient.abs().max().item(), 1e-3)
            assert (found[name] - gradient).abs().max() < 2e-5 * largest, name
