"""Every method starts from the same weights and sees the same rows."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from outergrad.launch.errors import RecipeError
from outergrad.optim import Muon
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.run import count_parameters
from outergrad_lab.bench.trainer import Phases, Trainer, batches, dataset
from outergrad_lab.workloads import WORKLOADS


@pytest.mark.parametrize("workload", WORKLOADS)
def test_without_files_random_data_of_the_same_shape_takes_their_place(tmp_path, workload):
    plan = Plan(workload=workload, sites=3, data_dir=tmp_path)
    data, name = dataset(plan)
    assert name == "synthetic"
    assert data.format == plan.recipe.format
    x, _ = next(batches(plan, plan.recipe, data, site=2))
    assert x.shape == (plan.recipe.batch_size, *plan.recipe.format.shape)


@pytest.mark.parametrize("workload", [name for name, one in WORKLOADS.items() if one.data])
def test_a_loss_to_reach_without_files_tells_what_is_not_there(tmp_path, workload):
    with pytest.raises(RecipeError, match=r"is not there: .*--data-dir") as caught:
        dataset(Plan(workload=workload, until_loss=0.5, data_dir=tmp_path))
    assert "\n" not in str(caught.value)


def test_real_data_is_taken_where_it_is(data_dir):
    data, name = dataset(Plan(data_dir=data_dir))
    assert name == "mnist"
    assert len(data.x_train) > 10_000


def test_sites_hold_rows_of_their_own(tmp_path):
    plan = Plan(workload="deep-mlp", sites=2, data_dir=tmp_path)
    data, _ = dataset(plan)
    seen = [
        torch.cat([x for x, _ in islice(batches(plan, plan.recipe, data, s), 2)]) for s in range(2)
    ]
    rows = torch.cat(seen)
    assert len(rows.unique(dim=0)) == len(rows) == len(data.x_train)


def test_batches_come_without_end_and_the_same_again(tmp_path):
    plan = Plan(workload="deep-mlp", data_dir=tmp_path)
    data, _ = dataset(plan)
    first, again = [list(islice(batches(plan, plan.recipe, data, 0), 7)) for _ in range(2)]
    assert all(x.equal(u) and y.equal(v) for (x, y), (u, v) in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, SGD), ({"until_loss": 0.5}, Adam), ({"optimizer": "muon"}, Muon)],
)
def test_a_step_is_timed_phase_by_phase(tmp_path, settings, kind):
    data, _ = dataset(Plan(workload="deep-mlp", data_dir=tmp_path))
    plan = Plan(workload="deep-mlp", **settings)
    trainers = [Trainer(plan, "alone", data, site) for site in (0, 1)]
    weights = [list(trainer.replica.model.parameters()) for trainer in trainers]
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))
    assert isinstance(trainers[0].optimizer, kind)
    before = [weight.clone() for weight in weights[0]]
    phases = trainers[0].step()
    assert not all(a.equal(b) for a, b in zip(weights[0], before, strict=True))
    assert phases.step_s == phases.forward_s + phases.backward_s + phases.optimizer_s
    assert min(phases.forward_s, phases.backward_s, phases.optimizer_s) > 0
    assert trainers[0].claimed_bytes() is None
    trainers[0].close()


def test_the_phases_have_names():
    wanted = ["forward_s", "backward_s", "optimizer_s", "compress_s", "wait_s"]
    assert Phases.names() == wanted


MINE = f"{__name__}:shared"
SHARED = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def shared(rows):
    """Returns the same model each time, and inputs by name."""
    return SHARED, {"input": torch.ones(rows, 7)}


def test_a_model_of_ones_own_has_other_weights_in_each_trainer():
    plan = Plan(workload=MINE, rows=4, methods=("alone",))
    data, name = dataset(plan)
    assert (data, name) == (None, "its own")
    trainers = [Trainer(plan, "alone", data, site) for site in (0, 1)]
    before = [p.clone() for p in SHARED.parameters()]
    assert trainers[0].step().step_s > 0
    first, second = ([*t.replica.model.parameters()] for t in trainers)
    assert all(p.equal(q) for p, q in zip(second, before, strict=True))
    assert not any(p.equal(q) for p, q in zip(first, before, strict=True))
    assert count_parameters(plan) == 7 * 5 + 5 + 5 * 3 + 3


def test_rows_of_a_workload_can_be_changed(tmp_path):
    plan = Plan(workload="deep-mlp", rows=3, data_dir=tmp_path)
    data, _ = dataset(plan)
    x, _ = next(batches(plan, plan.recipe, data, site=0))
    assert len(x) == 3
