"""Checks of `mesh=` against method, model and settings: a problem and its remedy each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from outergrad.core.transform import GradientTransform
from outergrad.methods.auto.chooser import Auto
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.inspect import Inspection

_SHARDED = "a model of fully_shard()"


def refuse(problems: Iterator[str]) -> None:
    """Raises ValueError, with the remedy, for the first problem, if there is one."""
    first = next(problems, None)
    if first is not None:
        raise ValueError(f"mesh= with {first}")


def of_method(method: Any, *, sharded: bool) -> Iterator[str]:
    """Yields problems of a method that needs sites of one rank, or whole matrices."""
    if isinstance(method, Auto) and method.frozen is None:
        yield (
            "og.Auto(): the ranks of a site do not tell each other how long steps take; name a "
            "method, or what was chosen without a mesh, og.Auto(frozen=session.choice())"
        )
    if sharded and isinstance(method, LocalSteps):
        yield from _of_outer(method)


def _of_outer(steps: LocalSteps) -> Iterator[str]:
    """Yields the problem of an outer optimizer that needs whole matrices."""
    made = steps.optimizer([nn.Parameter(torch.zeros(1))])
    if getattr(made, "needs_matrices", False):
        yield (
            f"outer={type(made).__name__} of {_SHARDED}: a rank has rows of a matrix alone, which "
            f"cannot be made orthonormal by themselves; leave outer= out"
        )


def of_inspection(inspection: Inspection, *, sharded: bool, steps: bool) -> Iterator[str]:
    """Yields problems of a method with this model."""
    if inspection.joint_parts:
        yield (
            "PerLayer(joint=True): deltas are averaged while backward runs, and what the ranks of "
            "a site have comes together behind it; use joint=False"
        )
    for name in [*inspection.local, *inspection.local_buffers]:
        if sharded or steps:
            yield (
                f"og.Local() for {name!r} of {_SHARDED} or with og.LocalSteps: its ranks have to "
                f"share it; give it another method"
            )
    for name, k in inspection.every.items():
        if sharded and k != 1:
            yield (
                f"every={k} for {name!r} of {_SHARDED}: what FSDP2 leaves of a pass is not kept "
                f"outside of param.grad; use session.no_sync() for the passes in between"
            )


def of_settings(settings: Mapping[str, Any], *, sharded: bool, steps: bool) -> Iterator[str]:
    """Yields problems of settings that need sites of one rank, whole models, or gradients."""
    weighting, buffers = settings["weighting"], settings["buffers"]
    if steps and weighting != "sites":
        yield (
            f"weighting={weighting!r} and og.LocalSteps: the ranks of a site count alike in the "
            f"steps between two exchanges; leave it out, or use group= over all ranks"
        )
    if sharded and weighting != "sites":
        yield (
            f"weighting={weighting!r} of {_SHARDED}: FSDP2 averages the ranks of a site alike; use "
            f"batches of one size"
        )
    if buffers not in (None, "local") and (sharded or steps):
        what = _SHARDED if sharded else "og.LocalSteps"
        yield (
            f"buffers={buffers!r} and {what}: each rank keeps its own; leave it out, and average "
            f"running statistics before a test"
        )
    yield from _of_transform(settings["transform"], sharded=sharded)
    if sharded and settings["verify_every"] is not None and settings["on_drift"] == "mend":
        yield (
            f"on_drift='mend' of {_SHARDED}: states of its optimizers are DTensors of FSDP2, which "
            f"are not compared; use on_drift='raise'"
        )


def _of_transform(transform: GradientTransform | None, *, sharded: bool) -> Iterator[str]:
    """Yields problems of a transform that asks for what no rank sees."""
    if transform is None:
        return
    if sharded:
        yield (
            f"transform={transform!r} of {_SHARDED}: each rank has some rows of every gradient, "
            f"and none a whole one; use a model that is whole on every rank"
        )
    if transform.needs_samples:
        yield (
            f"transform={transform!r}, which needs_samples: the rows of a site's ranks come "
            f"together without the samples that they are of; use group= over all ranks, so that "
            f"each is a site with samples of its own"
        )
