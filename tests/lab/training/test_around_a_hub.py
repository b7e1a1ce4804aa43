"""Real data around a hub: the losses are those over torch.distributed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import outergrad as og
from covering import covering
from outergrad_lab.data import load
from outergrad_lab.models import build_model
from outergrad_lab.training.split import Batches, even_split
from ranks import run_ranks
from seeding import seed
from stars import on_star

SITES, STEPS, ROWS = 2, 30, 16
METHODS = {"dense": og.Dense(), "dad": og.DAD(), "rank-dad": og.RankDAD(rank=4)}


def losses(data, start, method, rank, **where):
    """Of a site, step by step, and what its model says of a few rows in the end."""
    model = copy.deepcopy(start)
    session = og.distribute(model, method, **where)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = even_split(data, SITES, 0)
    settings = {"batch_sizes": [ROWS] * SITES, "steps": STEPS, "seed": 0}
    batches = Batches(
        x=data.x_train, y=data.y_train, rows_by_site=rows, sites=(rank,), **settings
    ).forever()
    found = []
    for _ in range(STEPS):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(x.double()), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    session.detach()
    with torch.no_grad():
        return found, model(data.x_test[:20].double())


@pytest.mark.parametrize(
    ("name", "method"), covering(["mnist", "pneumonia"], list(METHODS), quick=3)
)
def test_losses_are_those_of_torch_distributed(name, method, data_dir):
    data = load(name, data_dir)
    seed(0)
    job = data, build_model("mlp", data.format, (64, 32)).double(), METHODS[method]
    around = on_star(SITES, lambda rank, one: losses(*job, rank, transport=one))
    straight = run_ranks(SITES, lambda rank, group: losses(*job, rank, group=group))
    for (found, outputs), (expected, theirs) in zip(around, straight, strict=True):
        assert found == pytest.approx(expected, rel=1e-9)
        assert found[-1] < found[0]
        assert torch.allclose(outputs, theirs, rtol=1e-9, atol=1e-12)
