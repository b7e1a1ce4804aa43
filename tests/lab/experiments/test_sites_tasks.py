"""Tasks that plan a step among many sites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.run import count_parameters
from outergrad_lab.experiments.kinds import SitesWork
from outergrad_lab.experiments.task import Context, read

SETTINGS = {
    "workload": "deep-mlp",
    "sites": 4,
    "link": "100mbit",
    "latency": "20ms",
    "methods": ["dad", "dense", "rank-dad:rank=2:reduce=two_way"],
    "seconds": 1e-9,
}
REFUSED = [
    ({"workload": "huge"}, "workload must be one of mlp"),
    ({"sites": 1}, "sites must be a whole number of 2"),
    ({"link": "loopback", "latency": "0ms"}, "loopback has no rate"),
    ({"latency": "20"}, "latency '20' cannot be read"),
    ({"methods": ["ddp"]}, "ddp cannot be planned"),
    ({"method": "dad"}, "no setting 'method'"),
]


@pytest.mark.parametrize(("changed", "said"), REFUSED)
def test_a_wrong_setting_is_refused_by_name(changed, said):
    with pytest.raises(RecipeError, match=said):
        read(SitesWork, {**SETTINGS, **changed})


def test_bytes_of_a_step_are_exact_and_progress_is_told():
    told: list[int] = []
    context = Context(data_dir=Path(), steps=told.append, advance=lambda: told.append(1))
    found = read(SitesWork, SETTINGS).run(context)
    parameters = count_parameters(Plan(workload="deep-mlp"))
    dense = found["steps"]["dense"]
    ring_bytes = 2 * (4 - 1) / 4 * 4 * parameters
    assert dense["sent_bytes"] == pytest.approx(ring_bytes, rel=1e-3)
    assert told == [1, 1]
    assert json.loads(json.dumps(found)) == found


def test_every_method_has_its_step():
    found = read(SitesWork, SETTINGS).run(Context(data_dir=Path()))
    assert set(found["steps"]) == set(SETTINGS["methods"])
    for step in found["steps"].values():
        assert step["step_s"] >= step["compute_s"] + 0.02
        assert step["wire_bytes"] > step["sent_bytes"] > 0
