"""Workloads for `outergrad plan`, by name."""

from functools import partial

from torch.nn.functional import cross_entropy

from outergrad.tools.plan.subject import Subject
from outergrad_lab.data import synthetic
from outergrad_lab.workloads import WORKLOADS


def subjects() -> dict[str, partial[Subject]]:
    """Returns makers of the workloads, given a number of rows; None for the workload's own."""
    return {name: partial(_subject, name) for name in WORKLOADS}


def _subject(name: str, rows: int | None) -> Subject:
    recipe = WORKLOADS[name]
    rows = recipe.batch_size if rows is None else rows
    model, data = recipe.build(), synthetic(recipe.format, rows, seed=0)
    x, y = data.x_train, data.y_train
    return Subject(name, model, rows, lambda called: cross_entropy(called(x), y), (x, y))
