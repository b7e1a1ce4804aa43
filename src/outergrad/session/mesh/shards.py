"""Shards of an FSDP2 model: each rank shares its own with its counterparts at the other sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.capture.changes import ShardWatch
from outergrad.capture.claims import is_claimed
from outergrad.comm.agree import broadcast_all
from outergrad.comm.words import words_of_all
from outergrad.core.model import Model
from outergrad.core.transport import Comm
from outergrad.methods.assignment import is_local, is_policy
from outergrad.methods.common import is_method
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.mesh.levels import Levels, Mesh
from outergrad.session.mesh.mesh_step import ScatterResult
from outergrad.session.mesh.rank_reports import RankReport, RankStatus
from outergrad.step.captured import Captured
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep


def is_sharded(model: nn.Module) -> bool:
    """True if `torch.distributed.fsdp.fully_shard` was applied to some part of the model."""
    wrapped = (base.__name__ for m in model.modules() for base in type(m).__mro__)
    return "FSDPModule" in wrapped


class Shards:
    """This rank's shards of a model's parameters, as plain parameters.

    They share memory with the model's parameters, so that a write to one is seen in the other.

    Args:
        model: the sharded model.

    Attributes:
        params: the model's parameters, `DTensor`s, by name.
        module: holds the shards under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self.params: dict[str, Any] = dict(model.named_parameters())
        self.module = nn.Module()
        for name, p in self.params.items():
            *path, leaf = name.split(".")
            parent = self.module
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(leaf, nn.Parameter(shard_of(p), p.requires_grad))
        self._own = dict(self.module.named_parameters())

    def take(self) -> None:
        """Sets each shard's `grad` to this rank's part of the model's gradient, sharing memory."""
        for name, own in self._own.items():
            grad = self.params[name].grad
            own.grad = None if grad is None else shard_of(grad)

    def give_back(self) -> None:
        """Clears the shards' `grad`; the model gets gradients that only other sites had."""
        for name, own in self._own.items():
            p, own_grad = self.params[name], own.grad
            own.grad = None
            if p.grad is None and own_grad is not None:
                p.grad = _like(p, own_grad)


def shard_of(t: Any) -> Tensor:
    """Returns this rank's part of a `DTensor`, in the same memory."""
    with torch.no_grad():
        return t.to_local()


def _like(p: Any, own: Tensor) -> Any:
    from torch.distributed.tensor import DTensor  # its import costs half a second

    return DTensor.from_local(
        own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def look_at(model: nn.Module, method: Any, mesh: Mesh) -> tuple[Inspection, Shards]:
    """Inspects a sharded model: what is shared are its shards, of which no factors are known.

    Raises:
        ValueError: the model is not sharded over the ranks of a site, or the method needs factors.
    """
    for name, _ in model.named_parameters():
        for one in method.candidates(name) if is_policy(method) else [method]:
            _check_method(one)
    ranks = torch.distributed.get_process_group_ranks(mesh.get_group("local"))
    for name, p in model.named_parameters():
        _check_parameter(name, p, ranks)
    shards = Shards(model)
    inspection = inspect(shards.module, method, {})
    trained = {name: shards.params[name] for name in inspection.model.params}
    local = {name: shards.params[name] for name in inspection.local}
    watch = ShardWatch(model, trained, local, lambda name: is_local(method, name))
    return replace(inspection, watch=watch), shards


def _check_method(method: Any) -> None:
    compressor = method.compressor() if is_method(method) else None
    if compressor is not None and not compressor.takes_plain:
        raise ValueError(
            f"method={method!r} with a model of fully_shard(): the factors of a layer make up the "
            f"gradient of the whole weight, while each rank has some of its rows, already "
            f"summed over the site; use og.RankDAD(...), og.PowerSGD(...), og.Sparse(...) or "
            f"og.Dense()"
        )


def _check_parameter(name: str, p: Any, ranks: Sequence[int]) -> None:
    if is_claimed(p):
        raise ValueError(f"{name!r} is distributed already: call session.detach() first")
    if type(p).__name__ != "DTensor":
        raise ValueError(
            f"{name!r} is not sharded, other parameters are: call fully_shard(model, "
            f"mesh=mesh['local']) on the whole model, without ignored_params"
        )
    own = p.device_mesh
    if own.ndim != 1 or torch.distributed.get_process_group_ranks(own.get_group()) != ranks:
        raise ValueError(
            f"{name!r} is sharded over {own}, so that FSDP2 itself would reduce its gradient "
            f"between sites, or over other ranks than those of one site: call fully_shard(model, "
            f"mesh=mesh['local'])"
        )
    if not p.placements[0].is_shard():
        raise ValueError(f"{name!r} is placed as {p.placements}: it has to be sharded")


class Sharded:
    """Intra-site reducer for FSDP2, which itself reduces gradients and leaves each rank its shards.

    Args:
        shards: this rank's shards; None if their changes are shared, which FSDP2 does not know.
        model: model of these shards.
        local: transport to the ranks of this site.

    Attributes:
        params: parameters of the sharded model, by name.
        active: none: models of FSDP2 have no joined loops.
    """

    def __init__(self, shards: Shards | None, model: Model, local: Comm) -> None:
        self._shards, self._model, self.local = shards, model, local
        self.active: list[int] = []
        known = model.params if shards is None else shards.params
        self.params = {name: known[name] for name in model.params}

    def prepare(self, captured: Captured) -> None:
        """Does nothing: FSDP2 has reduced the gradients."""

    def reduce(
        self, spec: StepSpec, captured: Captured, fate: RankStatus
    ) -> tuple[StepSpec, RankStatus]:
        """Gives the step the gradients that FSDP2 has left, and this rank's own status."""
        if self._shards is None:
            return spec, fate
        self._shards.take()
        used = captured.used
        header = replace(spec.header, used=tuple(name in used for name in spec.model.params))
        return replace(spec, header=header, used=set(used)), fate

    def tell(self, ending: RankReport, step: SharedStep | None) -> list[list[int]]:
        """Gives the gradients back to the model, and exchanges the reports on all shares."""
        if self._shards is not None:
            self._shards.give_back()
        return words_of_all(self.local, ending.words())

    def spread(self, step: SharedStep) -> ScatterResult:
        """Returns the result of this rank's shares; every rank has its mean gradients already."""
        assert step.choice is not None
        units, choice = self._model.units, step.choice
        reasons = dict(zip(units, choice.reasons, strict=True))
        return ScatterResult(
            step.context.used, dict(zip(units, choice.tap_next, strict=True)), reasons
        )


def broadcast_shards(levels: Levels, inspection: Inspection, model: nn.Module) -> None:
    """Makes shards equal to their counterparts at the first site, and buffers on all ranks."""
    own = [*inspection.model.params.values(), *inspection.frozen.values()]
    broadcast_all(levels.site, own)
    levels.broadcast_all(list(model.buffers()))
