"""Workloads for `outergrad plan` and `outergrad audit`, by name."""

from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from outergrad.tools.plan.subject import RealRows, Subject
from outergrad_lab.data import decoder, load, synthetic
from outergrad_lab.workloads import WORKLOADS


def subjects() -> dict[str, partial[Subject]]:
    """Returns makers of the workloads, given a number of rows; None for the workload's own."""
    return {name: partial(_subject, name) for name in WORKLOADS}


def _subject(name: str, rows: int | None) -> Subject:
    recipe = WORKLOADS[name]
    rows = recipe.batch_size if rows is None else rows
    model, data = recipe.build(), synthetic(recipe.format, rows, seed=0)
    x, y = data.x_train, data.y_train
    real = partial(_real, recipe.data) if recipe.data else None
    return Subject(name, model, rows, lambda called: cross_entropy(called(x), y), (x, y), real)


def _real(data: str, data_dir: Path, rows: int) -> RealRows:
    """Returns drawn training rows, the same every time: files may be sorted by class."""
    found = load(data, data_dir)
    order = torch.randperm(len(found.x_train), generator=torch.Generator().manual_seed(0))[:rows]
    x, y = found.x_train[order], found.y_train[order]
    return RealRows(name=data, x=x, y=y, decode=decoder(data, data_dir))
