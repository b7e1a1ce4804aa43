"""Checks of `transform=` against model, method and settings, and its notes in the coverage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from outergrad.core.model import Compressors, Model
from outergrad.core.transform import GradientTransform
from outergrad.core.types import Unit
from outergrad.methods.dense import CapturedDense, Dense, DenseCompressor
from outergrad.methods.local_steps import LocalSteps
from outergrad.methods.per_layer import PerLayer
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.inspect import Inspection

_REMEDY = "freeze it (requires_grad_(False)) or make it og.Local()"


def check_transform(transform: Any) -> None:
    """Raises if the argument is no gradient transform.

    Raises:
        TypeError: it is a class, cannot be called, or lacks the flags of a transform.
        ValueError: it has no `__repr__`, by which the sites compare it.
    """
    if transform is None:
        return
    if isinstance(transform, type):
        raise TypeError(
            f"transform is the class {transform.__name__}: pass an object, "
            f"{transform.__name__}(...)"
        )
    needs = [getattr(transform, f"needs_{what}", None) for what in ("samples", "all_layers")]
    flags = [
        *needs,
        *(getattr(transform, flag, False) for flag in ("forms", "adds_up", "sent_only")),
    ]
    if not callable(transform) or not all(type(flag) is bool for flag in flags):
        raise TypeError(
            f"transform={transform!r}: pass an object that can be called, with needs_samples and "
            f"needs_all_layers, True or False (og.transforms.GradientTransform)"
        )
    if type(transform).__repr__ is object.__repr__:
        raise ValueError(
            f"transform={type(transform).__name__}: the sites compare its repr, which is that of "
            f"every object: give it a __repr__ with its settings, or make it a frozen dataclass"
        )


def capturing(method: Any, transform: GradientTransform | None) -> Any:
    """Returns the method; `Dense` becomes `CapturedDense` if the transform needs samples."""
    if transform is None or not transform.needs_samples:
        return method
    if isinstance(method, PerLayer):
        methods = {p: capturing(one, transform) for p, one in method.methods.items()}
        return replace(method, methods=methods)
    return CapturedDense(every=method.every) if type(method) is Dense else method


def refuse_unfit(
    transform: GradientTransform | None,
    model: nn.Module,
    method: Any,
    inspection: Inspection,
    *,
    keeps: bool,
    weighting: str = "sites",
) -> None:
    """Raises if a site would send something that the transform does not see.

    Args:
        transform: as for `distribute`.
        model: as for `distribute`.
        method: as for `distribute`.
        inspection: of the model.
        keeps: whether each site keeps its own buffers.
        weighting: as for `distribute`.

    Raises:
        ValueError: names what the transform would not see, with the remedy.
    """
    if transform is None:
        return
    problems = [_of_any(inspection)]
    if transform.needs_all_layers:
        problems.append(_of_all_layers(method, inspection))
    if transform.needs_samples:
        problems.append(_of_samples(model, method, inspection))
        problems.append(iter(()) if keeps else _of_buffers(model, inspection))
    if getattr(transform, "sent_only", False):
        problems.append(_of_what_is_sent(inspection))
    if getattr(transform, "adds_up", False):
        problems.append(_of_sums(transform, inspection, weighting))
    first = next((why for found in problems for why in found), None)
    if first is not None:
        raise ValueError(f"transform={transform!r}: {first}")


def _of_any(inspection: Inspection) -> Iterator[str]:
    for found in inspection.blocks:
        yield (
            f"{found.block.params[0]!r} would be computed again by every site from activations, "
            f"which no transform changes: use og.DAD() for it"
        )
    for name in inspection.joint_parts:
        yield (
            f"PerLayer(joint=True) sends deltas of {name!r}, which no transform changes: use "
            f"joint=False"
        )


def _of_all_layers(method: Any, inspection: Inspection) -> Iterator[str]:
    if isinstance(method, LocalSteps) and method.stream > 1:
        yield (
            f"needs_all_layers, but og.LocalSteps(stream={method.stream}) exchanges a fragment of "
            f"the model at a time: use stream=1"
        )
    first, *others = inspection.every.items()
    for name, k in others:
        if k != first[1]:
            yield (
                f"needs_all_layers, but {first[0]!r} travels with every={first[1]} and {name!r} "
                f"with every={k}: give all methods one every="
            )


def _of_samples(model: nn.Module, method: Any, inspection: Inspection) -> Iterator[str]:
    if isinstance(method, LocalSteps):
        yield (
            f"needs_samples, but og.LocalSteps sends how weights as "
            f"{next(iter(inspection.model.params))!r} have changed, which is of no sample, and "
            f"noise that hides all that a site has would hide the change, too, unless there are "
            f"many hundreds of sites: use og.DAD() or og.Dense(), in several passes "
            f"(session.no_sync()) where a step is to have more samples"
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield (
                f"needs_samples, but {name!r} is a {type(module).__name__}, which mixes the "
                f"samples of a batch: use a GroupNorm or LayerNorm, which sees each sample by "
                f"itself"
            )
    for name, k in inspection.every.items():
        if k != 1:
            yield (
                f"needs_samples, but {name!r} has every={k}, and samples are not kept over several "
                f"passes: leave every=1"
            )
    for name, why in inspection.model.reasons.items():
        yield f"needs_samples, but {name!r} has no gradient by sample ({why}): {_REMEDY}"
    for layer in inspection.layers:
        if not hasattr(layer.rule, "by_sample"):
            yield (
                f"needs_samples, but the rule of {layer.slots[0].weight!r}, "
                f"{type(layer.rule).__name__}, has no by_sample(): write it (docs/extending.md), "
                f"or {_REMEDY}"
            )


def _of_buffers(model: nn.Module, inspection: Inspection) -> Iterator[str]:
    for name, _ in model.named_buffers():
        if name not in inspection.local_buffers:
            yield (
                f"needs_samples, but buffer {name!r}, if forwards write to it, would travel as it "
                f"is: pass buffers='local'"
            )


def _of_sums(transform: GradientTransform, inspection: Inspection, weighting: str) -> Iterator[str]:
    if weighting != "sites":
        yield (
            f"weighting={weighting!r} would multiply what a site sends by its samples, which is "
            f"part of a sum in which all sites count alike: leave weighting='sites'"
        )
    for compressor, units in inspection.compressors.items() if transform.forms else ():
        for unit in units:
            name = unit.params[0]
            if compressor.remembers(unit):
                yield (
                    f"the method of {name!r} keeps what it has not sent and adds it to later sums, "
                    f"noise and all, but what is promised of a sum is about the samples of one "
                    f"step: set error_feedback=None (og.RankDAD) or False (og.PowerSGD, og.Sparse)"
                )
            if not compressor.sums_formed:
                yield (
                    f"the method of {name!r} sends what each site has chosen of its own gradient, "
                    f"not part of a sum over the sites: use og.Dense(), og.RankDAD(reduce="
                    f"'all_reduce' or 'alternate'), og.PowerSGD() or og.Sparse(select='random'), "
                    f"without error feedback"
                )


def _of_what_is_sent(inspection: Inspection) -> Iterator[str]:
    if not any(compressor.sends_known for compressor, _ in inspection.compressors.items()):
        yield (
            "sent_only=True, but of no parameter it is known before a step what will be sent: use "
            "og.RankDAD(reduce='alternate', error_feedback=None) without a tolerance, or "
            "og.Sparse(select='random' or 'random_blocks', error_feedback=False), or leave "
            "sent_only=False"
        )


def refuse_join(transform: GradientTransform | None) -> None:
    """Raises if a site that has run out would be missing in sums that need all sites.

    Raises:
        RuntimeError: it would.
    """
    if getattr(transform, "adds_up", False):
        raise RuntimeError(
            f"session.join(): a site that has run out adds nothing to the sum, and {transform!r} "
            f"needs the part of every site: let every site make the same number of steps, where "
            f"it has no samples with an empty batch"
        )


def refuse_scaler(transform: GradientTransform | None) -> None:
    """Raises if gradients are multiplied by the scale of a `GradScaler` before the transform.

    Raises:
        RuntimeError: they are, and the transform needs the gradient of each sample as it is.
    """
    if transform is not None and transform.needs_samples:
        raise RuntimeError(
            f"GradScaler.step(): {transform!r} is given gradients that are multiplied by the "
            f"scale, as if every sample were so much longer: train without a GradScaler, in "
            f"bfloat16 or float32"
        )


# -- coverage table -------------------------------------------------------------------------------


def units_shown(model: Model, compressors: Compressors) -> tuple[Sequence[Unit], dict[str, str]]:
    """Returns the units that may travel as rows, and why each other parameter travels dense."""
    dense = [u for u in model.units if isinstance(compressors[u], DenseCompressor)]
    why = {name: "the method is dense" for unit in dense for name in unit.params}
    return [unit for unit in model.units if unit not in dense], {**model.reasons, **why}


def changes(transform: GradientTransform | None) -> dict[str, bool]:
    """Returns whether gradients are changed before they travel, and whether by noise."""
    from outergrad.private.private import Private  # which most sessions do not need

    noisy = isinstance(transform, Private) and transform.noise > 0
    return {"changed": transform is not None, "noisy": noisy}


def noted(lines: Coverage, transform: GradientTransform | None) -> Coverage:
    """Notes in the coverage of each parameter that travels that a transform changes it first."""
    if transform is None:
        return lines
    return Coverage(tuple(_noted(line, transform) for line in lines))


def _noted(line: Travel, transform: GradientTransform) -> Travel:
    if line.travels in ("local", "not trained"):
        return line
    why = line.why
    if getattr(transform, "forms", False) and line.travels in ("dense", "factors or dense"):
        line, why = replace(line, travels="dense"), "the transform returns formed gradients"
    return replace(line, why=f"{why}; after {transform!r}")
