"""A plan is refused before anything starts, by the name of the option to mend."""

from __future__ import annotations

from dataclasses import fields
from math import inf, nan

import pytest

from outergrad.launch.errors import RecipeError
from outergrad_lab.bench.plan import COMPARED, Plan
from outergrad_lab.workloads import WORKLOADS

COUNTS = ("sites", "steps", "rounds", "threads", "check_every", "max_steps")
BAD = [
    ("workload", "chess", "one of mlp, "),
    ("rows", 0, " or more, not 0"),
    ("optimizer", "magic", "one of adam, "),
    ("methods", (), "at least one"),
    ("methods", ("ddp", "dad", "ddp"), "each method once"),
    ("methods", ("magic",), "not 'magic'"),
    ("methods", ("",), "not ''"),
    ("methods", ("ddp", "pooled"), "pooled exchanges nothing"),
    *[(name, value, " or more, not") for name in COUNTS for value in (0, -1)],
    ("sites", 1, "2 or more, not 1"),
    ("warmup", 2, "PowerSGD starts"),
    *[("seconds", value, "above 0 and finite") for value in (0, -1, nan, inf)],
    *[("until_loss", value, "above 0 and finite") for value in (0, -1, nan, inf)],
]


def test_the_defaults_are_allowed():
    assert Plan().methods == COMPARED
    assert {"ddp", "dense", "dad", "auto"} < {*COMPARED}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_allowed(workload):
    assert Plan(workload=workload).recipe is WORKLOADS[workload]


@pytest.mark.parametrize(("name", "value", "said"), BAD)
def test_a_bad_value_is_refused_in_one_line_by_the_name_of_its_option(name, value, said):
    with pytest.raises(RecipeError) as caught:
        Plan(**{name: value})
    text = str(caught.value)
    option = {"workload": "model"}.get(name, name.replace("_", "-"))
    assert text.startswith(f"--{option} ")
    assert said in text
    assert "\n" not in text


def test_every_option_but_the_data_folder_has_a_bad_value():
    assert {field.name for field in fields(Plan)} - {name for name, *_ in BAD} == {"data_dir"}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_loss_to_reach_needs_real_data(workload):
    if WORKLOADS[workload].data:
        assert Plan(workload=workload, until_loss=0.5).until_loss == 0.5
    else:
        with pytest.raises(RecipeError, match=f"^--until-loss needs real data; {workload} has"):
            Plan(workload=workload, until_loss=0.5)
