"""A case trained in float64 in one place, by DDP, and by a method of ours; and how they compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from zoo_case import Batch, Case, deprecated_calls
from zoo_table import ZOO

import outergrad as og
from ranks import run_on_lasting_groups
from replaying import EPS, whole_error

SITES, STEPS = 2, 3
"""The first two steps have headers; the last goes by their plan."""

LIMIT = 5e-6
"""Relative, of the gradient of a parameter."""

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Step:
    """Where a training stands, and what gradients are there.

    Attributes:
        weights: before the step.
        by_ddp: what DDP leaves in `grad`.
        expected: the mean over sites in float64.
    """

    weights: dict[str, Tensor]
    by_ddp: Gradients
    expected: Gradients


@dataclass(frozen=True)
class Note:
    """What a backward of a loop left, and where the weights were."""

    step: int
    weights: dict[str, Tensor]
    gradients: Gradients


class InDouble(TorchFunctionMode):
    """Models that compute in float32 on purpose do it in float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        function = Tensor.double if function is Tensor.float else function
        named = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        return function(*map(_doubled, args), **named)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def batch_of(case: Case, site: int, step: int) -> Batch:
    return case.batch(torch.Generator().manual_seed(100 * step + site), site)


def loss_of(case: Case, model: nn.Module, batch: Batch) -> Tensor:
    with case.context():
        return case.loss(model(**batch))


def gradients_of(model: nn.Module) -> Gradients:
    """Copies, of what is trained."""
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: None if g is None else g.clone() for name, g in trained.items()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """As an optimizer does, in place."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(weights[name])


@cache
def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    with deprecated_calls():
        return ZOO[name].build()


def mean_in_double(name: str, weights: dict[str, Tensor], step: int) -> Gradients:
    """Of the sites' gradients, without any of our code."""
    case, model = ZOO[name], copy.deepcopy(built(name)).double()
    with deprecated_calls():
        case.plain(model)
    set_weights(model, weights)
    with InDouble():
        for site in range(SITES):
            batch = {k: _in_double(v) for k, v in batch_of(case, site, step).items()}
            (case.loss(model(**batch)) / SITES).backward()
    return gradients_of(model)


def mean_of_sites(name: str, weights: dict[str, Tensor], step: int) -> Gradients:
    """The same in float32: what DDP leaves, without DDP."""
    case, model = ZOO[name], copy.deepcopy(built(name))
    set_weights(model, weights)
    for site in range(SITES):
        (loss_of(case, model, batch_of(case, site, step)) / SITES).backward()
    return gradients_of(model)


def _in_double(value: Any) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if is_floating else value


@cache
def course(name: str) -> list[Step]:
    """A training by DDP and SGD: every other run takes its weights from here, step by step."""
    built(name)  # once: threads that find nothing in the cache would both draw its weights
    by_ddp = run_on_lasting_groups(SITES, lambda rank, group: train_by_ddp(name, rank, group))[0]
    return [
        Step(weights, gradients, mean_in_double(name, weights, k))
        for k, (weights, gradients) in enumerate(by_ddp)
    ]


def train_by_ddp(name: str, rank: int, group: dist.ProcessGroup) -> list[Any]:
    case, model = ZOO[name], copy.deepcopy(built(name))
    wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    steps = []
    for k in range(STEPS):
        optimizer.zero_grad()
        weights = weights_of(model)
        loss_of(case, wrapped, batch_of(case, rank, k)).backward()
        steps.append((weights, gradients_of(model)))
        optimizer.step()
    return steps


def train(
    name: str, method: Any, look: Callable[[og.Session], Any] = lambda session: None
) -> list[tuple[list[Gradients], Any]]:
    """Of each site the gradients of every step by a method, and a look at its session."""
    steps = course(name)

    def body(rank: int, group: dist.ProcessGroup) -> tuple[list[Gradients], Any]:
        case, model, found = ZOO[name], copy.deepcopy(built(name)), []
        session = og.distribute(model, method, group=group)
        for k, step in enumerate(steps):
            set_weights(model, step.weights)
            model.zero_grad()
            loss_of(case, model, batch_of(case, rank, k)).backward()
            found.append(gradients_of(model))
        seen = look(session)
        session.detach()
        return found, seen

    return run_on_lasting_groups(SITES, body)


def assert_equal_sites(found: list[list[Gradients]]) -> None:
    """To the bit, in every step."""
    for others in found[1:]:
        for k, (first, other) in enumerate(zip(found[0], others, strict=True)):
            for name, gradient in first.items():
                assert _are_equal(gradient, other[name]), f"step {k}: {name} differs between sites"


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else one.equal(other)


def assert_as_near_as_ddp(found: Gradients, by_ddp: Gradients, expected: Gradients) -> None:
    """To the mean in float64: each, and all together at most twice as far as DDP's."""
    assert_each_near(found, by_ddp, expected, LIMIT)
    error, peer = (whole_error(gradients, expected) for gradients in (found, by_ddp))
    assert error <= max(2 * peer, EPS), f"all gradients: {error:.1e}, DDP {peer:.1e}"


def assert_all_replayed(session: og.Session, blocks: Sequence[str]) -> None:
    """What belongs to these modules was computed again by all sites."""
    of_blocks = [
        line
        for line in session.coverage()
        if any(fnmatch(line.parameter, f"{block}.*") for block in blocks)
    ]
    assert of_blocks or not blocks
    for line in of_blocks:
        assert line.travels == "replayed", f"{line.parameter} travels {line.travels}: {line.why}"


def assert_each_near(
    found: Gradients, by_ddp: Gradients, expected: Gradients, relative: float
) -> None:
    """Of what is zero but for rounding, to the last digit of the largest."""
    assert found.keys() == expected.keys()
    whole = sum(g.norm() ** 2 for g in expected.values() if g is not None) ** 0.5
    for name, gradient in expected.items():
        if gradient is None or found[name] is None:
            assert gradient is found[name], name
            continue
        error, peer = ((g[name] - gradient).norm() for g in (found, by_ddp))
        limit = max(relative * gradient.norm(), 2 * peer) + EPS * whole
        assert error <= limit, f"{name}: {error:.1e} of {gradient.norm():.1e}, DDP {peer:.1e}"
