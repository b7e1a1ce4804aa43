from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from outergrad.recipes import training
from outergrad.recipes.data import load, synthetic
from outergrad.recipes.job import Job
from outergrad.recipes.methods import METHODS
from outergrad.recipes.training import deal, start
from outergrad.recipes.workloads import WORKLOADS
from ranks import run_ranks

DIGITS = load("digits", Path())
EXACT = [name for name in METHODS if not name.startswith(("ddp-fp16", "powersgd"))]


def train(**job) -> tuple[torch.Tensor, float]:
    """Losses of every step and the test accuracy."""
    job = Job(widths=(64,), epochs=2, batch_size=32, lr=3e-3, **{"sites": 1, **job})
    site = start(job, DIGITS, deal(job, DIGITS))
    losses = [loss for epoch in range(job.epochs) for loss in site.epoch(epoch)]
    accuracy = site.accuracy()
    site.replica.close()
    return torch.tensor(losses), accuracy


@pytest.mark.parametrize("method", EXACT)
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


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "vgg"])
def test_labels_are_counted_and_scored_in_batches_as_at_once(monkeypatch, name):
    workload = WORKLOADS[name]
    data, model = synthetic(workload.format, rows=2, seed=0), workload.build().eval()
    logits = model(data.x_test)
    monkeypatch.setattr(training, "TEST_ROWS", 5)
    expected = (logits.argmax(dim=1) == data.y_test).float().mean()
    assert training.accuracy(model, data) == pytest.approx(expected.item())
    for rows in (3, 7, 1000):
        expected = cross_entropy(logits[:rows], data.y_test[:rows]).item()
        assert training.test_loss(model, data, rows) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("was_training", [True, False])
def test_a_tested_model_is_as_it_was(was_training):
    workload = WORKLOADS["cnn"]
    data, model = synthetic(workload.format, rows=2, seed=0), workload.build()
    model.train(was_training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training.test_loss(model, data, 4)
    training.accuracy(model, data)
    assert all(module.training == was_training for module in model.modules())
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


def test_a_site_can_test_by_itself_under_ddp():
    workload = WORKLOADS["cnn"]
    data = synthetic(workload.format, rows=4, seed=0)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        replica = METHODS["ddp"](workload.build(), group)
        for _ in range(2):
            cross_entropy(replica.model(data.x_train), data.y_train).backward()
            if rank == 0:
                assert training.test_loss(replica.model, data, 4) > 0

    run_ranks(2, body)
