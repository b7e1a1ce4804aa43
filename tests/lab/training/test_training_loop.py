from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from covering import covering
from outergrad.tools.named_methods.attach import METHODS, Attach, attach_of
from outergrad_lab.data import load, synthetic
from outergrad_lab.models import build_model
from outergrad_lab.models.small import mlp
from outergrad_lab.training import training
from outergrad_lab.training.job import Job
from outergrad_lab.training.recording import Recording
from outergrad_lab.training.split import Batches, batch_sizes, full_batches
from outergrad_lab.training.training import Training, deal, start
from outergrad_lab.workloads import WORKLOADS
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


@pytest.mark.parametrize("method", covering(list(EXACT), quick=3))
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


@pytest.mark.parametrize("method", ["dense", "dad", "local-steps:k=1:lr=1:momentum=0"])
def test_unequal_sites_step_as_one_that_has_the_union_of_their_batches(method):
    """Local steps: by SGD, whose step is linear in the gradient."""
    job = Job(method="alone", sites=3, split="unequal", batch_size=8, widths=(9,))
    rows_by_site = deal(job, DIGITS)
    sizes = batch_sizes(job.split, rows_by_site, job.batch_size)
    assert len(set(sizes)) == 3

    model = build_model(job.model, DIGITS.format, job.widths)

    def weights(sites: Sequence[int], attach: Attach, group: dist.ProcessGroup | None) -> Tensor:
        replica = attach(copy.deepcopy(model), group)
        batches = Batches(
            x=DIGITS.x_train,
            y=DIGITS.y_train,
            rows_by_site=rows_by_site,
            sites=sites,
            batch_sizes=sizes,
            steps=full_batches(rows_by_site, sizes),
            seed=0,
        )
        optimizer = SGD(replica.model.parameters(), lr=0.3)
        site = Training(
            data=DIGITS,
            batches=batches,
            replica=replica,
            optimizer=optimizer,
            recording=Recording(None, "", replica),
        )
        assert len(list(site.epoch(0))) > 20
        replica.close()
        return nn.utils.parameters_to_vector(replica.model.parameters()).detach()

    expected = weights(range(3), METHODS["pooled"], None)
    for found in run_ranks(3, lambda rank, group: weights([rank], attach_of(method), group)):
        assert torch.allclose(found, expected, atol=1e-5)


def test_unequal_sites_learn(one_site):
    _, accuracy = train(method="pooled", sites=4, split="unequal")
    assert accuracy > 0.7


def test_training_ends_with_a_flush():
    def body(rank: int, group: dist.ProcessGroup) -> Tensor:
        replica = attach_of("local-steps:k=4")(mlp((3, 2)), group)
        generator = torch.Generator().manual_seed(rank)
        optimizer = SGD(replica.model.parameters(), lr=0.1)
        for _ in range(6):
            optimizer.zero_grad()
            replica.model(torch.randn(5, 3, generator=generator)).sum().backward()
            optimizer.step()
        replica.finish()
        stats = replica.session.stats()
        assert stats.step == 2
        sent_bytes = stats.total_sent_bytes - replica.start_bytes
        assert replica.sent_bytes == round(sent_bytes / 8), "per step, not per exchange"
        replica.close()
        return replica.model[0].weight.detach()

    first, second = run_ranks(2, body)
    assert first.equal(second)


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
