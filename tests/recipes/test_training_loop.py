from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outergrad.recipes.data import load
from outergrad.recipes.job import Job
from outergrad.recipes.replica import METHODS, all_reduce_bytes
from outergrad.recipes.training import deal, start

DIGITS = load("digits", Path())


def train(**job) -> tuple[torch.Tensor, float]:
    """Losses of every step and the test accuracy."""
    job = Job(widths=(64,), epochs=2, batch_size=32, lr=3e-3, **{"sites": 1, **job})
    training = start(job, DIGITS, deal(job, DIGITS))
    losses = [loss for epoch in range(job.epochs) for loss in training.epoch(epoch)]
    accuracy = training.accuracy()
    training.replica.close()
    return torch.tensor(losses), accuracy


@pytest.mark.parametrize("method", METHODS)
def test_one_site_learns_the_same_by_every_method(one_site, method):
    losses, accuracy = train(method=method)
    expected, _ = train(method="pooled")
    assert accuracy > 0.8
    assert torch.allclose(losses, expected, atol=1e-5)


def test_pooled_takes_the_batches_of_all_sites(one_site):
    _, pooled = train(method="pooled", sites=2, split="class")
    _, alone = train(method="alone", sites=2, split="class")
    assert pooled > 0.8
    assert alone < 0.55


def test_a_seed_decides_everything(one_site):
    first, second, other = (train(method="alone", seed=seed)[0] for seed in (1, 1, 2))
    assert first.equal(second)
    assert not first.equal(other)


def test_one_site_sends_nothing_by_ddp(one_site):
    assert all_reduce_bytes(torch.nn.Linear(3, 4)) == 0
