"""Steps of the user's own training, as `og.FileTap` has written them, and their truth."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.core.sent import Sent
from outergrad.launch.errors import RecipeError
from outergrad.record.file_tap import SentFile, SentStep
from outergrad.tools.audit.findings import Truth
from outergrad.tools.audit.subjected import Subjected, subjected

_FEWEST = 2
"""Canaries without which an AUC says nothing."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step to be attacked.

    Attributes:
        number: Of the step.
        model: The model, with the weights of the step.
        sent: All that the site has sent.
        truth: Rows behind it.
    """

    number: int
    model: nn.Module
    sent: Sequence[Sent]
    truth: Truth


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A file of steps.

    Attributes:
        method: The method, as text, with what changed gradients before they travelled.
        local_steps: Steps between two exchanges; None where gradients were shared.
        subject: The model with rows of the factory.
        steps: The steps.
    """

    method: str
    local_steps: int | None
    subject: Subjected
    steps: Sequence[RecordedStep]


def recorded(
    path: Path,
    model: str,
    positions: int | None,
    canaries: int,
    data_dir: Path | None = None,
) -> Recorded:
    """Reads a file, and builds its model.

    Args:
        path: The file.
        model: As for `subjected`; its rows are canaries, but for those that are in the truth.
        positions: Not to be used: texts are what they were.
        canaries: Number of rows that an attack must not find.
        data_dir: As for `subjected`.

    Raises:
        RecipeError: The file cannot be read, has no truth, or is of another model.
    """
    option = f"--recorded {path}"
    if positions is not None:
        raise RecipeError("--positions does not go with --recorded: texts are what they were")
    try:
        file = SentFile(path)
    except OSError as error:
        raise RecipeError(f"{option}: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{option}: {error}") from error
    untold = [step.step for step in file.steps if not step.truth]
    if untold or not file.steps:
        raise RecipeError(
            f"{option} has no truth of step {untold[0] if untold else 0}: call tap.truth(x, y) "
            f"before its backward"
        )
    most = max(sum(len(x) for x, _ in step.truth) for step in file.steps)
    found = subjected(model, most + canaries, data_dir=data_dir)
    steps = [_step(option, model, found, step, canaries) for step in file.steps]
    method = f"{file.method} with {file.transform}" if file.transform else file.method
    return Recorded(method=method, local_steps=file.local_steps, subject=found, steps=steps)


def _step(option: str, name: str, found: Subjected, step: SentStep, canaries: int) -> RecordedStep:
    own = copy.deepcopy(found.model)
    try:
        own.load_state_dict(step.weights)
    except RuntimeError as error:
        told = str(error).splitlines()[-1].strip()
        raise RecipeError(f"{option} is of another model than --model {name}: {told}") from error
    x, y = (torch.cat(parts) for parts in zip(*step.truth, strict=True))
    if (x.shape[1:], x.dtype) != (found.x.shape[1:], found.x.dtype):
        raise RecipeError(
            f"{option} has rows of {tuple(x.shape[1:])} in {x.dtype}, and --model {name} makes "
            f"{tuple(found.x.shape[1:])} in {found.x.dtype}"
        )
    try:
        cross_entropy(copy.deepcopy(own).eval()(x), y)
    except (IndexError, RuntimeError, ValueError) as error:
        raise RecipeError(
            f"{option} has rows or labels that --model {name} does not take: {error}"
        ) from error
    outside = _outside(found.x, found.y, x, canaries)
    if len(outside[0]) < _FEWEST:
        raise RecipeError(
            f"--model {name} makes the rows of the batch alone: make others, that attacks are to "
            f"find no trace of"
        )
    truth = Truth(x=x, y=y, outside=outside, vocabulary=replace(found, model=own).vocabulary)
    return RecordedStep(number=step.step, model=own, sent=step.sent, truth=truth)


def _outside(x: Tensor, y: Tensor, members: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the last rows that are not in the batch, with their labels."""
    known = {tuple(row) for row in members.flatten(1).tolist()}
    new = [n for n, row in enumerate(x.flatten(1).tolist()) if tuple(row) not in known][-most:]
    return x[new], y[new]
