"""Hours around a hub: steps times seconds, and cuts; planned where nothing was measured."""

from __future__ import annotations

import pytest
from made_up_results import ABOUT, a_test, training

from outergrad.launch.errors import RecipeError
from outergrad_lab.experiments.figures import write_figures
from outergrad_lab.experiments.frames import curves, finals
from outergrad_lab.experiments.hours import around_hub
from outergrad_lab.experiments.tables import write_tables

FEDAVG, LOW = "fedavg:k=5", "fedavg:k=5:method=rank-dad:rank=1"
WANTED = {
    "links": ["4mbit", "8mbit"],
    "rtt": "40ms",
    "cut_every_s": 100.0,
    "reference": {"w": FEDAVG},
}
STEPS, SENT, COMPUTE_S = 10, 1000, 0.01


def star(link, **steps):
    found = {
        method: {"step_s": s, "sent_bytes": b, "received_bytes": 2 * b, "cut_s": cut}
        for method, (s, b, cut) in steps.items()
    }
    settings = {"workload": "w", "link": link, "steps": STEPS, "methods": list(steps)}
    return {"kind": "star", "settings": settings, "steps": found, "seconds": 1.0, **ABOUT}


def results(*timed):
    return [
        training(
            [1.0] * STEPS,
            tests=[a_test(STEPS, SENT * STEPS)],
            workload="w",
            method=method,
            steps=STEPS,
            seed=seed,
        )
        | {"compute_s": COMPUTE_S}
        for method in (FEDAVG, LOW)
        for seed in (0, 1)
    ] + list(timed)


def hours(seconds, times):
    """So many times, nearly."""
    return pytest.approx([seconds / 3600] * times)


def cell(frame, name, **where):
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame[name].tolist()


def test_measured_steps_and_cuts_make_the_time():
    timed = star("4mbit", **{FEDAVG: (2.0, 500, 7.0), LOW: (0.5, 10, 3.0), "ddp": (9, 9, None)})
    found = around_hub(finals(results(timed)), results(timed), WANTED, "steps")
    cuts = 1 + (7.0 + 3.0) / 2 / 100
    of_link = {"link": "4mbit", "times": "measured"}
    assert cell(found, "hours", method=LOW, **of_link) == hours(STEPS * 0.5 * cuts, 2)
    assert cell(found, "hours", method=FEDAVG, **of_link) == hours(STEPS * 2.0 * cuts, 2)
    assert cell(found, "line_bytes", method=LOW, **of_link) == [STEPS * 3 * 10] * 2
    assert cell(found, "fewer_line", method=LOW, **of_link) == [50] * 2
    assert cell(found, "quicker", method=LOW, **of_link) == pytest.approx([4] * 2)


def test_what_was_not_measured_is_planned_and_says_so():
    found = around_hub(finals(results()), results(), WANTED, "steps")
    assert set(found["times"]) == {"planned"}
    per_step = COMPUTE_S + 2 * SENT * 8 / 8e6 + 0.04 / 5
    assert cell(found, "hours", method=LOW, link="8mbit") == hours(STEPS * per_step, 2)
    assert cell(found, "line_bytes", method=LOW, link="4mbit") == [2 * SENT * STEPS] * 2


def test_measured_and_planned_are_not_compared():
    timed = star("4mbit", **{FEDAVG: (2.0, 500, None)})
    found = around_hub(finals(results(timed)), results(timed), WANTED, "steps")
    alone = found[(found["link"] == "4mbit") & (found["method"] == LOW)]
    assert alone["quicker"].isna().all()
    assert alone["fewer_line"].isna().all()
    assert found[found["link"] == "8mbit"]["quicker"].notna().all()


def test_a_course_ends_where_the_training_does():
    timed = star("4mbit", **{FEDAVG: (2.0, 500, None)})
    found = around_hub(curves(results(timed)), results(timed), WANTED, "step")
    of_link = found[(found["link"] == "4mbit") & (found["method"] == FEDAVG)]
    assert [of_link["hours"].max()] == hours(STEPS * 2.0, 1)
    planned = found[(found["link"] == "8mbit") & (found["step"] == STEPS)]
    end = around_hub(finals(results(timed)), results(timed), WANTED, "steps")
    expected = end[end["link"] == "8mbit"]["hours"].tolist()
    assert planned["hours"].tolist() == pytest.approx(expected)


def test_a_table_tells_hours_in_units_that_fit(tmp_path):
    timed = star("4mbit", **{FEDAVG: (720.0, 500, None), LOW: (1.2, 10, None)})
    table = {
        "name": "hours",
        "around": {**WANTED, "links": ["4mbit"]},
        "rows": ["method", "times"],
        "columns": "link",
        "value": ["hours", "quicker"],
    }
    (found,) = write_tables([table], results(timed), tmp_path)
    assert found.rows == [
        ["FedAvg, k = 5", "measured", "2.00 h", "1.00\N{MULTIPLICATION SIGN}"],
        [
            "FedAvg, rank 1, k = 5, method = rank-dad",
            "measured",
            "12.0 s",
            "600\N{MULTIPLICATION SIGN}",
        ],
    ]


def test_a_wrong_setting_is_named():
    with pytest.raises(RecipeError, match="rtt is missing"):
        around_hub(finals(results()), results(), {"links": ["4mbit"]}, "steps")


def test_a_table_of_trainings_waits_for_the_first(tmp_path):
    timed = [star("4mbit", **{FEDAVG: (1.0, 500, None)})]
    tables = [
        {"name": "sites", "rows": ["method", "site"], "value": "accuracy"},
        {"name": "hours", "around": WANTED, "rows": "method", "columns": "link", "value": "hours"},
        {"name": "rates", "where": {"kind": "training"}, "rows": "lr", "value": "accuracy"},
        {"name": "steps", "rows": "method", "value": "step_s"},
    ]
    assert [table.name for table in write_tables(tables, timed, tmp_path)] == ["steps"]
    course = {"x": "hours", "y": "auc", "lines": "method", "panels": ["workload", "link"]}
    figure = {"name": "auc", "around": WANTED, "where": {"method": FEDAVG}, **course}
    assert not write_figures([figure], timed, tmp_path)
