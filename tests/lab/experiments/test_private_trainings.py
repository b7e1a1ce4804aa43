"""Private trainings of experiments: noise for an ε, Poisson batches, and Opacus on pooled data."""

from __future__ import annotations

from contextlib import closing
from itertools import islice

import pytest
import torch

import outergrad as og
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import simulate
from outergrad_lab.data import load
from outergrad_lab.experiments.private import Privacy
from outergrad_lab.experiments.task import Context
from outergrad_lab.experiments.training import TrainingWork
from outergrad_lab.training.job import Job
from outergrad_lab.training.training import deal

SETTINGS = {"data": "digits", "widths": [16], "batch_size": 32, "steps": 6, "sites": 2}
STEPS = 4


def trained(tmp_path, method: str, clip: float) -> dict[str, torch.Tensor]:
    """Weights after a few steps with next to no noise."""
    job = Job(method=method, data="digits", widths=(16,), batch_size=32, lr=0.01)
    data = load("digits", tmp_path)
    sampling = og.private.Poisson(64 / len(data.x_train))
    release = og.private.Release(1e-9 / clip, sampling, sites=2, sums="masked")
    privacy = Privacy(release, STEPS, 1e-5, clip)

    def site(group, stop):
        with closing(privacy.start(job, data, deal(job, data), group)) as training:
            assert len([*islice(training.epoch(0), STEPS)]) == STEPS
            model = training.replica.model
            return {name.removeprefix("_module."): p for name, p in model.state_dict().items()}

    return simulate(site, 1 if method == "pooled" else 2)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("clip", [0.1, 100.0])
def test_sites_make_the_steps_of_opacus_on_the_pooled_rows(clip, tmp_path):
    ours, theirs = (trained(tmp_path, method, clip) for method in ("dense", "pooled"))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sites", [2, 4])
def test_the_noise_is_the_least_for_the_epsilon(sites, tmp_path):
    settings = {**SETTINGS, "sites": sites, "batch_size": 64 // sites, "method": "dense"}
    work = TrainingWork.of({**settings, "epsilon": 3})
    found = work.run(Context(data_dir=tmp_path))
    rows = len(load("digits", tmp_path).x_train)
    assert found["noise"] == og.private.noise_for(3, 1e-5, 64 / rows, 6)
    own = og.private.noise_for(
        found["site_epsilon"], 1e-5, 64 / rows, 6, sites=sites, sums="masked", observer="site"
    )
    assert found["site_epsilon"] > 3
    assert own == pytest.approx(found["noise"], rel=5e-3)
    assert len(found["losses"]) == 6


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "ddp"}, "epsilon: ddp has no privacy; use pooled"),
        ({"method": "alone"}, "epsilon: alone has no privacy"),
        ({"method": "dense", "steps": None, "epochs": 1}, "--steps must be given, with epsilon"),
    ],
)
def test_what_has_no_privacy_is_refused(settings, told):
    settings = {**SETTINGS, "epsilon": 3, **settings}
    given = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(RecipeError, match=told):
        TrainingWork.of(given)
