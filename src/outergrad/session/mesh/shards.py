"""Sites whose ranks hold shards of the model (FSDP2): shards travel between counterparts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.capture.changes import ModelWatch, ShardWatch
from outergrad.capture.claims import HeldHooks, HookedClaim, is_claimed
from outergrad.capture.engine import NO_TASK, at_end_of_backward, refuse_nested_backward
from outergrad.capture.optimizer_steps import look_at_steps
from outergrad.comm.agree import broadcast_all
from outergrad.core.model import Model
from outergrad.messages.header import Header
from outergrad.methods import PerLayer
from outergrad.methods.per_layer import is_local
from outergrad.record.gauge import Reading
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.mesh.level_step import LevelStep, SharePlanner
from outergrad.session.mesh.levels import Levels, Mesh
from outergrad.session.mesh.rank_reports import Fate, told_fates
from outergrad.session.mesh.two_levels import LevelsSession
from outergrad.session.settings import Settings
from outergrad.step.captured import Captured
from outergrad.step.groups import end_unfinished, on_group
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep


def is_sharded(model: nn.Module) -> bool:
    """Whether `torch.distributed.fsdp.fully_shard` was applied to some part of the model."""
    wrapped = (base.__name__ for m in model.modules() for base in type(m).__mro__)
    return "FSDPModule" in wrapped


class Shards:
    """This rank's shards of a model's parameters, as plain parameters.

    They share memory with the model's, so that what is written to one is in the other.

    Args:
        model: sharded.

    Attributes:
        params: the model's, `DTensor`s, by name.
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
        """Lends the gradients of the model's parameters to the shards."""
        for name, own in self._own.items():
            grad = self.params[name].grad
            own.grad = None if grad is None else shard_of(grad)

    def give_back(self) -> None:
        """Takes them back, with those that only other sites had."""
        for name, own in self._own.items():
            p, own_grad = self.params[name], own.grad
            own.grad = None
            if p.grad is None and own_grad is not None:
                p.grad = _like(p, own_grad)


def shard_of(t: Any) -> Tensor:
    """This rank's part of a `DTensor`: the same memory."""
    with torch.no_grad():
        return t.to_local()


def _like(p: Any, own: Tensor) -> Any:
    """A `DTensor` of this rank's part, laid out as another one."""
    from torch.distributed.tensor import DTensor  # its import costs half a second

    return DTensor.from_local(
        own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def look_at(model: nn.Module, method: Any, mesh: Mesh) -> tuple[Inspection, Shards]:
    """What is shared of a sharded model: its shards, of which only formed gradients are known.

    Raises:
        ValueError: it is not sharded over the ranks of a site, or the method needs factors.
    """
    _check_methods(method)
    ranks = torch.distributed.get_process_group_ranks(mesh.get_group("local"))
    for name, p in model.named_parameters():
        _check_parameter(name, p, ranks)
    shards = Shards(model)
    inspection = inspect(shards.module, method, {})
    trained = {name: shards.params[name] for name in inspection.model.params}
    local = {name: shards.params[name] for name in inspection.local}
    watch = ShardWatch(model, trained, local, lambda name: is_local(method, name))
    return replace(inspection, watch=watch), shards


def _check_methods(method: Any) -> None:
    for one in method.methods.values() if isinstance(method, PerLayer) else [method]:
        exchange = one.exchange() if callable(getattr(one, "exchange", None)) else None
        if exchange is not None and not exchange.takes_plain:
            raise ValueError(
                f"method={one!r} with a model of fully_shard(): the factors of a layer make up the "
                f"gradient of the whole weight, while each rank has some of its rows, already "
                f"summed over the site; use og.RankDAD(...), og.PowerSGD(...) or og.Dense()"
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


class ShardStep(LevelStep):
    """Once FSDP2 has reduced the gradients inside the site, each rank takes its shards onwards.

    Args:
        task: of the backward.
        model: the shards.
        header: without what is used.
        planner: of the shards.
        levels: the ranks.
        shards: the same, with the model's parameters.
        reading: measures the shards, if the step is recorded.

    Attributes:
        used: parameters that FSDP2 has had a gradient for until now.
    """

    def __init__(
        self,
        task: int,
        model: Model,
        header: Header,
        planner: SharePlanner,
        levels: Levels,
        shards: Shards,
        reading: Reading | None,
    ) -> None:
        super().__init__(task, model, set(), header.step, planner)
        self._model, self._header, self._reading = model, header, reading
        self._levels, self._shards = levels, shards
        self.params = {name: shards.params[name] for name in model.params}

    def on_ready(self, name: str) -> None:
        """FSDP2 has the gradient of a shard."""
        self.used.add(name)

    def _go_through(self, fate: Fate) -> None:
        self._shards.take()
        fate = self._between(self._shared, fate)
        self._shards.give_back()
        self.used |= set() if self.shared is None else self.shared.context.used
        self._conclude(told_fates(self._levels.local, fate))
        if self.shared is not None and self.shared.choice is not None:
            units = self._model.units
            self.reasons = dict(zip(units, self.shared.choice.reasons, strict=True))

    def _shared(self) -> SharedStep:
        model, comm = self._model, self._levels.site
        masks = tuple(name in self.used for name in model.params)
        spec = StepSpec(
            model=model,
            planner=self._planner,
            comm=comm,
            header=replace(self._header, used=masks),
            used=set(self.used),
            reading=self._reading,
        )
        return SharedStep(spec)


class ShardedSession(LevelsSession):
    """A session of which every rank shares its shards with its counterparts at the other sites.

    FSDP2 calls the hooks of sharded parameters once it has reduced their gradients; at the end of
    backward, behind FSDP2's own end, the mean over the sites is formed.
    """

    def __init__(
        self,
        inspection: Inspection,
        levels: Levels,
        fingerprint: int,
        settings: Settings,
        shards: Shards,
    ) -> None:
        super().__init__(inspection, levels, fingerprint, settings)
        self._shards, self._fingerprint = shards, fingerprint
        self._planner = SharePlanner(inspection.model, inspection.exchanges, levels.site.world_size)
        trained = {name: shards.params[name] for name in inspection.model.params}
        self._claims = {
            n: HookedClaim(p, self, partial(self.on_ready, n)) for n, p in trained.items()
        }

    def detach(self) -> None:
        """As `Session.detach`; FSDP2 goes on inside the site."""
        for claim in self._claims.values():
            claim.remove()
        super().detach()

    def watch(self, model: nn.Module, watch: ModelWatch) -> None:
        """Looks at the model before steps of optimizers: else FSDP2 has its own tensors in it."""
        self._model_watch = lambda: watch
        self._thread = get_ident()
        look_at_steps(self)

    def _hooks(self) -> dict[str, HeldHooks]:
        return {name: claim.hooks for name, claim in self._claims.items()}

    def _begin(self, task: int) -> None:
        refuse_nested_backward()
        end_unfinished(self._comm.group)
        self._refuse_lost()
        self._refuse_unfrozen()
        for claim in self._claims.values():
            claim.hooks.hold()
        step = self._step = self._sharded(task) if self._synchronise else self._kept(task)
        at_end_of_backward(lambda: self._finish(step))

    def _kept(self, task: int) -> UnsyncedStep:
        """A backward under `no_sync()`: its gradients are the site's until the next shared one."""
        captured = Captured(self._model, set())

        def on_ready(name: str) -> None:
            self._unshared.add(name)
            captured.used.add(name)

        return UnsyncedStep(task, captured, on_ready)

    def _sharded(self, task: int) -> ShardStep:
        sessions, number = on_group(self._comm.group), self._stats.step
        alone, reading = len(sessions.attached) == 1, self._reporter.reading(number)
        header = Header(self._fingerprint, number, self._comm.rank, (), (), alone)
        parts = (header, self._planner, self._levels, self._shards, reading)
        step = ShardStep(task, self._model, *parts)
        step.used |= self._unshared
        sessions.running.append(self)
        return step

    def _unused_step(self) -> ShardStep:
        return self._sharded(NO_TASK)

    def _refuse_unfrozen(self) -> None:
        for name in self._frozen:
            if self._shards.params[name].requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the model was distributed and would not be shared: "
                    f"call session.detach() and og.distribute(model, ...) again on every rank"
                )


def broadcast_shards(levels: Levels, inspection: Inspection, model: nn.Module) -> None:
    """Makes the shards equal to their counterparts of the first site, and buffers everywhere."""
    own = [*inspection.model.params.values(), *inspection.frozen.values()]
    broadcast_all(levels.site, own)
    levels.broadcast_all(list(model.buffers()))
