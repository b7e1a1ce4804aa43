"""distribute(): look at the model, agree with the other sites, swap the classes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outergrad.capture import weighting as _weighting
from outergrad.capture.parameters import OwnParameters
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.capture.weighting import Weighting
from outergrad.comm.agree import agree, all_came, broadcast_all, fingerprint
from outergrad.comm.link import measured_link
from outergrad.comm.torch import TorchComm
from outergrad.core.protocols import Comm, Method, Rules
from outergrad.core.types import Link
from outergrad.layers import RULES
from outergrad.messages.checksum import combined
from outergrad.methods import DAD, LocalSteps, PerLayer
from outergrad.record.recorders import Recorders, recorders_of
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.blocks_found import FoundBlock
from outergrad.session import drift as _drift
from outergrad.session.description import describe, shared_tensors
from outergrad.session.drift import checksums
from outergrad.session.farewell import say_farewell
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.local_steps import LocalStepsSession
from outergrad.session.mesh.levels import Levels, Mesh, levels_of, refuse_inspection, refuse_method
from outergrad.session.mesh.shards import (
    ShardedSession,
    Shards,
    broadcast_shards,
    is_sharded,
    look_at,
)
from outergrad.session.mesh.two_levels import TwoLevelSession
from outergrad.session.options import check_drift, check_settings, time_span
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step import buffers as _buffers
from outergrad.step.buffers import SharedBuffers
from outergrad.step.groups import count_session, end_unfinished, lost_sites_told, refuse_lost


def distribute(
    model: nn.Module,
    method: Method | PerLayer | LocalSteps | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: Mesh | None = None,
    recorder: Recorders = None,
    rules: Rules = RULES,
    timeout: float | timedelta | None = None,
    max_bad_steps: int | None = None,
    weighting: _weighting.Kind = "sites",
    buffers: _buffers.Kind | None = None,
    verify_every: int | None = None,
    on_drift: _drift.OnDrift = "raise",
) -> Session:
    """Shares the gradients of a model between the sites of a process group, in place.

    Afterwards every `loss.backward()` leaves in each `param.grad` the mean over the sites of their
    local gradients, as `DistributedDataParallel` does; model, optimizer and training loop stay as
    they are. Parameters and buffers are first made equal to rank 0's. Call it on every site of the
    group, at the same point of the program.

    Args:
        model: any module, not wrapped but by `torch.compile`; its parameters on one device.
        method: how gradients travel: `og.DAD()` by default; `og.PerLayer({...})` for a method per
            part of the model, `og.Local()` for a part that is not shared; `og.LocalSteps(k)` to
            share not gradients but what k steps of each site have changed.
        group: the sites; the default group if None.
        mesh: instead of a group, sites of several ranks: a `DeviceMesh` with the dimensions "site"
            and "local". The gradients of a site's ranks are pooled before they travel, so that
            sites send each other as much as if each had one rank (docs/two-levels.md).
        recorder: is told of steps: `og.JSONL(path)`, `og.TensorBoard(dir)`, `og.WandB(run)`, any
            object with a method `record(event)` that takes `og.events`, or a list of them.
        rules: what is known about layer types; extend by `{**og.RULES, MyLayer: MyRule()}`.
        timeout: seconds, or a timedelta, that a site may wait for a message before it gives the
            others up and raises `og.SiteLostError`; None for the timeout of the process group, by
            PyTorch's default 30 minutes. It must be longer than what sites differ in arriving at a
            step. NCCL goes by the group's.
        max_bad_steps: skip a step on all sites if the gradient of one has NaN or infinities: after
            `backward()` every `param.grad` is None then, so that the optimizer leaves everything
            as it is; after more such steps in a row than this raise `og.BadStepsError`. None: they
            go where they would go with DDP. Leave it None with a GradScaler, which skips by
            itself, on all sites alike.
        weighting: "sites": every site counts alike, as with DDP; "samples": a site counts by the
            number of its samples, so that the gradient is that of one large batch, whatever the
            sites' own sizes. See `Session.samples`.
        buffers: what becomes of buffers that forwards write to, as running statistics, in every
            shared step: "broadcast": all sites get rank 0's, as with DDP; "mean": floating ones
            become their mean by the weights of the gradients, others rank 0's; "local": each site
            keeps its own. Those that nobody writes to cost nothing.
        verify_every: after how many shared steps that count the sites compare checksums of all
            shared parameters and buffers; None for never. Processors of different instruction
            sets round differently, so that replicas may drift apart.
        on_drift: what to do where they differ: "raise" `og.DriftError` on all sites, "warn", or
            "mend": all sites take site 0's, with the states of optimizers, and warn.

    Returns:
        The session: `no_sync()`, `coverage()`, `stats()`, `flush()`, `join()`, `samples()`,
        `make_equal()`, `state_dict()`, `load_state_dict()`, `detach()`.

    Raises:
        ValueError: the model or the method cannot be used, or the sites differ: the same message
            on every site, naming the first difference and the rank that has it.
        RuntimeError: there is no process group.
        SiteLostError: another site does not come, or went.
    """
    model, method = _uncompiled(model), DAD() if method is None else method
    if mesh is not None and group is not None:
        raise ValueError("mesh= and group= both say who takes part: pass one of them")
    device, span = _device(model), time_span(timeout)
    levels = None if mesh is None else levels_of(mesh, device, span)
    comm = TorchComm(_group(group), device, span) if levels is None else levels.site
    refuse_lost(comm.group)
    error, inspection, shards, recorders = None, None, None, ()
    try:
        recorders = recorders_of(recorder)
        inspection, shards = _look_at(model, method, rules, mesh)
        check_settings(inspection, mesh, weighting, max_bad_steps, buffers)
        check_drift(verify_every, on_drift, mesh)
    except (ValueError, TypeError) as raised:
        error = raised
    end_unfinished(comm.group)
    lines = [] if inspection is None else describe(model, method, inspection)
    lines += [f"session {count_session(comm.group)} of the group", f"weighting: {weighting}"]
    lines += [f"buffers: {buffers}", f"max_bad_steps: {max_bad_steps}"]
    lines += [f"verify_every: {verify_every}, on_drift: {on_drift}"]
    with lost_sites_told(comm, "og.distribute on all sites"):
        agreed = agree(comm, lines, error) if levels is None else levels.agree(lines, error)
        assert inspection is not None
        _make_equal(comm, levels, shards, model, inspection)
        _settle_reduce(inspection, comm.world_size, lambda: measured_link(comm))
        shared = [] if shards is not None else [t for _, _, t in shared_tensors(model, inspection)]
        all_came(comm, combined(checksums(shared)))
    counted = Weighting(weighting)
    kind = buffers or ("broadcast" if mesh is None else "local")
    settings = Settings(
        method=repr(method),
        recorders=recorders,
        max_bad_steps=max_bad_steps,
        weighting=counted,
        buffers=SharedBuffers(model, kind, inspection.local_buffers),
        verify_every=verify_every,
        on_drift=on_drift,
    )
    session = _session(inspection, comm, levels, shards, agreed, method, settings)
    counted.watch(model)
    session.watch(model, inspection.watch)
    say_farewell(comm, agreed)
    return session


def _session(
    inspection: Inspection,
    comm: Comm,
    levels: Levels | None,
    shards: Shards | None,
    agreed: int,
    method: Any,
    settings: Settings,
) -> Session:
    if isinstance(method, LocalSteps):
        return LocalStepsSession(inspection, comm, agreed, settings, method)
    if levels is not None and shards is not None:
        return ShardedSession(inspection, levels, agreed, settings, shards)
    if levels is not None:
        return _attach(TwoLevelSession(inspection, levels, agreed, settings), inspection)
    return _attach(Session(inspection, comm, agreed, settings), inspection)


def _make_equal(
    comm: TorchComm,
    levels: Levels | None,
    shards: Shards | None,
    model: nn.Module,
    inspection: Inspection,
) -> None:
    """Parameters and buffers, to those of the first site."""
    if shards is not None:
        assert levels is not None
        broadcast_shards(levels, inspection, model)
        return
    tensors = [t for _, _, t in shared_tensors(model, inspection)]
    if levels is None:
        broadcast_all(comm, tensors)
    else:
        levels.broadcast_all(tensors)


def _uncompiled(model: nn.Module) -> nn.Module:
    """What `torch.compile(model)` stands around: parameters go by their names in the plain model.

    By the name of its class: importing it takes a second.
    """
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model  # type: ignore[return-value]


def _look_at(
    model: nn.Module, method: Method | PerLayer | LocalSteps, rules: Rules, mesh: Mesh | None
) -> tuple[Inspection, Shards | None]:
    """What is shared, of shards of the model if ranks of a site hold such.

    A change of the weights has no factors, so that no rule is of use for `LocalSteps`.
    """
    if mesh is None and isinstance(method, LocalSteps):
        return inspect(model, method.method, {}), None
    if mesh is None:
        return inspect(model, method, rules), None
    refuse_method(method)
    sharded = is_sharded(model)
    inspection, shards = (
        look_at(model, method, mesh) if sharded else (inspect(model, method, rules), None)
    )
    refuse_inspection(inspection)
    return inspection, shards


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group('gloo') first, in a "
            "program started by torchrun, or pass group="
        )
    default = dist.group.WORLD
    assert default is not None
    return default


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _settle_reduce(inspection: Inspection, sites: int, measured: Callable[[], Link]) -> None:
    """Measures the link, once, where a method goes by it."""
    asking = [(e, units) for e, units in inspection.exchanges.items() if e.wants_link(sites)]
    link = measured() if asking else None
    for exchange, units in asking:
        assert link is not None
        exchange.settle_reduce(units, sites, link)


def attach(
    model: nn.Module,
    method: Method,
    comm: Comm,
    link: Link,
    rules: Rules = RULES,
    buffers: _buffers.Kind = "local",
) -> Session:
    """Distributes a model over a transport of any kind, whose sites are known to be alike.

    Args:
        model: as for `distribute`.
        method: as for `distribute`.
        comm: the transport; nothing is sent before the first step.
        link: what the slowest site has, for methods that go by it.
        rules: as for `distribute`.
        buffers: as for `distribute`; its bytes come on top of those of the method.

    Raises:
        ValueError: the model or the method cannot be used.
    """
    inspection = inspect(model, method, rules)
    _settle_reduce(inspection, comm.world_size, lambda: link)
    agreed = fingerprint(describe(model, method, inspection))
    shared = SharedBuffers(model, buffers, inspection.local_buffers)
    settings = Settings(method=repr(method), buffers=shared)
    return _attach(Session(inspection, comm, agreed, settings), inspection)


def _attach(session: Session, inspection: Inspection) -> Session:
    for layer in inspection.layers:
        watched = [session.watched(slot.params) for slot in layer.slots]
        session.attach(TappedLayer(layer.module, layer.rule, layer.slots, watched, session))
    for found in inspection.blocks:
        _attach_block(session, found)
    return session


def _attach_block(session: Session, found: FoundBlock) -> None:
    watched = [session.watched(params) for params in found.params_of]
    own = [OwnParameters(*pair) for pair in zip(found.modules_of, watched, strict=True)]
    tapped = TappedBlock(
        found.block,
        found.names,
        found.replayer,
        watched,
        own,
        codecs=found.codecs,
        raw_inputs=found.raw_inputs,
        explicit=found.explicit,
        sink=session,
    )
    found.swap(tapped)
    session.attach_block(tapped)
