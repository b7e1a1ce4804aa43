"""A swept setting: its best value for each method, and which runs are due."""

from __future__ import annotations

import math

import pytest
from made_up_results import a_test, training

from outergrad_lab.experiments.sweeps import best_values, due, group, number_due, with_best
from outergrad_lab.experiments.task import Task

RATES, SEEDS, METHODS = [0.001, 0.01, 0.1], [4, 5, 6], ["ddp", "dad"]
LOSSES = {("ddp", 0.001): 2.0, ("ddp", 0.01): 1.0, ("ddp", 0.1): math.nan}
"""Of the first seed; others are 3."""
SAME = {"data": "digits", "model": "mlp", "sites": 2}
TASKS = [
    Task(kind="training", settings={**SAME, "method": method, "lr": lr, "seed": seed})
    for method in METHODS
    for lr in RATES
    for seed in SEEDS
]


def result(settings):
    loss = LOSSES.get((settings["method"], settings["lr"]), 3.0)
    if settings["seed"] != SEEDS[0]:
        loss = 0.1 / settings["lr"]  # a later seed has no say
    return training([1.0], tests=[a_test(1, 100, loss=loss)], **settings)


def asked(tasks):
    return [(t.settings["method"], t.settings["lr"], t.settings["seed"]) for t in tasks]


def test_first_come_all_values_then_the_other_seeds_with_the_best():
    assert due(TASKS, [], "") == TASKS
    first = due(TASKS, [], "lr")
    assert asked(first) == [(m, lr, 4) for m in METHODS for lr in RATES]
    some = [result(task.settings) for task in first[:4]]  # ddp with all rates, dad with one
    assert asked(due(TASKS, some, "lr")) == [
        ("ddp", 0.001, 4),
        *(("ddp", 0.01, seed) for seed in SEEDS),
        ("ddp", 0.1, 4),
        *(("dad", lr, 4) for lr in RATES),
    ]
    results = [result(task.settings) for task in first]
    wanted = due(TASKS, results, "lr")
    assert len(wanted) == number_due(TASKS, "lr") == 2 * (3 + 2)
    assert due(TASKS, [result(task.settings) for task in wanted], "lr") == wanted


def test_the_best_is_that_of_the_first_seed_and_no_number_is_none():
    results = [result(task.settings) for task in TASKS]
    best = best_values(results, "lr")
    assert best[group({**SAME, "method": "ddp"}, "lr")] == 0.01
    kept = [(r["settings"]["method"], r["settings"]["lr"]) for r in with_best(results, "lr")]
    assert kept == [("ddp", 0.01)] * 3 + [("dad", 0.001)] * 3


@pytest.mark.parametrize("swept", ["lr", "seed", "rate"])
def test_what_is_not_swept_stays(swept):
    others = [training([1.0], method="ddp")]
    assert with_best(others, swept) == others


def test_rows_to_choose_by_decide_where_sites_keep_some():
    def kept(lr, validation_loss, loss):
        seen = a_test(1, 100, loss=loss) | {"validation_loss": validation_loss}
        return training([1.0], tests=[seen], **SAME, method="ddp", lr=lr)

    best = best_values([kept(0.001, 0.2, 0.5), kept(0.01, 0.3, 0.1)], "lr")
    assert list(best.values()) == [0.001]


def test_of_private_trainings_the_most_accurate_is_best():
    about = {**SAME, "method": "dad", "seed": 4, "epsilon": 3}
    results = [
        training([1.0], tests=[{**a_test(1, 100, loss=loss), "accuracy": right}], lr=lr, **about)
        for lr, loss, right in [(0.001, 1.0, 0.7), (0.01, 2.0, 0.9), (0.1, 3.0, 0.8)]
    ]
    assert best_values(results, "lr") == {group(about, "lr"): 0.01}
