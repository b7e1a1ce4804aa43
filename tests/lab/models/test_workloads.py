from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from outergrad_lab.data import SOURCES, synthetic
from outergrad_lab.models import MODELS
from outergrad_lab.workloads import WORKLOADS

LARGE = {"vgg"}
PARAMETERS = {
    "mlp": 784 * 1024 + 1024 * 1024 + 1024 * 10 + 2058,
    "vgg": 25088 * 4096 + 4096 * 4096 + 4096 * 1000 + 9192,
    "gru": 3 * 128 * (13 + 128 + 2) + 1290,
    "x-rays": 16 * 25 + 32 * 16 * 25 + 2 * 48 + 49 * 32 * 256 + 256 + 2 * 256 + 2,
    "lstm": 4 * 128 * (13 + 128 + 2) + 1290,
}


OF_EXPERIMENTS = {"bag", "plain-convolutions"}
"""Models of private trainings alone, whose layers Opacus takes."""


def test_every_model_has_a_workload():
    assert {workload.model for workload in WORKLOADS.values()} == set(MODELS) - OF_EXPERIMENTS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_the_format_of_its_data(name):
    workload = WORKLOADS[name]
    assert workload.summary
    assert workload.data is None or SOURCES[workload.data].format == workload.format
    assert MODELS[workload.model].fits(workload.format)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_workload_has_the_size_that_is_known(name):
    with torch.device("meta"):
        model = WORKLOADS[name].build()
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in LARGE])
def test_a_step_on_synthetic_data_lowers_its_loss(name):
    workload = WORKLOADS[name]
    model, data = workload.build(), synthetic(workload.format, workload.batch_size, seed=0)
    optimizer = SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = cross_entropy(model(data.x_train), data.y_train)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
