"""`distribute()`: inspects the model, agrees with the other sites, swaps the layers' classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from outergrad.capture import weighting as _weighting
from outergrad.capture.claims import unclaim
from outergrad.capture.optimizer_steps import look_away
from outergrad.capture.weighting import Weighting
from outergrad.comm.agree import agree, all_came, fingerprint
from outergrad.comm.link import measured_link
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.errors import ExchangeError, SiteLostError
from outergrad.core.protocols import Method, Policy, Rules
from outergrad.core.sent import Tap, TappedRun
from outergrad.core.transform import GradientTransform
from outergrad.core.transport import Comm, Transport
from outergrad.core.types import Link
from outergrad.layers import RULES
from outergrad.messages.checksum import combined
from outergrad.methods.local_steps import LocalSteps
from outergrad.record.origin import origin_of
from outergrad.record.recorders import Recorders, recorders_of
from outergrad.session import drift as _drift
from outergrad.session.arguments import (
    refuse_group,
    refuse_inference_mode,
    refuse_max_bad_steps,
    refuse_mesh,
    refuse_model,
    refuse_rules,
    refuse_tap,
    refuse_transport,
    time_span,
)
from outergrad.session.capable import refuse_incapable, transport_lines
from outergrad.session.choosing import measured_flops
from outergrad.session.description import describe
from outergrad.session.drift import checksums
from outergrad.session.drift_checks import drift_of
from outergrad.session.elastic import refuse_to_go_on
from outergrad.session.farewell import say_farewell
from outergrad.session.gossip_checks import is_gossip, refuse_gossip
from outergrad.session.handover import Handover, taken
from outergrad.session.inspect import Inspection, inspect
from outergrad.session.mesh.levels import Mesh, levels_of
from outergrad.session.pricing import settle, settle_again
from outergrad.session.quorum_checks import refuse_quorum
from outergrad.session.session import Session
from outergrad.session.settings import Settings, check_settings
from outergrad.session.topology import Topology, opened
from outergrad.session.transform_checks import capturing, check_transform, refuse_unfit
from outergrad.session.usual_method import usual_method
from outergrad.step import buffers as _buffers
from outergrad.step.buffers import SharedBuffers
from outergrad.step.transport_state import (
    count_session,
    end_unfinished,
    lost_sites_told,
    on_transport,
    refuse_lost,
)

if TYPE_CHECKING:
    from outergrad.gossip.settings import Gossip


def distribute(
    model: nn.Module,
    method: Method | Policy | LocalSteps | Gossip | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: Mesh | None = None,
    transport: Transport | None = None,
    recorder: Recorders = None,
    rules: Rules | None = None,
    timeout: float | timedelta | None = None,
    max_bad_steps: int | None = None,
    weighting: _weighting.Kind = "sites",
    buffers: _buffers.Kind | None = None,
    verify_every: int | None = None,
    on_drift: _drift.OnDrift = "raise",
    transform: GradientTransform | None = None,
    tap: Tap | None = None,
) -> Session:
    """Shares the gradients of a model between the sites of a process group, in place.

    Afterwards every `loss.backward()` leaves in each `param.grad` the mean over the sites of their
    local gradients, as `DistributedDataParallel` does; model, optimizer and training loop stay as
    they are. Parameters and buffers are first made equal to rank 0's. Call it on every site of the
    group, at the same point of the program.

    It changes the model in place, so the optimizer may be made before it or after. Move the model
    to its device and dtype before.

    Args:
        model: any module, not wrapped but by `torch.compile`; its parameters on one device.
        method: how gradients travel. By default `og.Auto()`: dense or as factors, whichever makes
            steps shorter here, which the sites measure while they train. It is exact, and other
            sites see no more than this site's gradient. What it chooses differs from run to run,
            and rounding with it: a run that has to repeat to the bit names its method, such as
            `og.DAD()`, `og.Dense()` or `og.Auto(frozen=choice)`. With `mesh=`, `transform=`, or a
            star whose sites go on without others, the default is `og.DAD()`. `og.PerLayer({...})`
            gives each part of the model its own method, `og.Local()` keeps a part unshared.
            `og.LocalSteps(k)` shares how k steps of each site have changed the weights, instead of
            gradients. `og.Gossip(graph)` averages weights between neighbours, without a centre.
        group: process group of the sites; the default group if None.
        mesh: instead of a group, sites of several ranks: a `DeviceMesh` with the dimensions "site"
            and "local". The gradients of a site's ranks are pooled before they travel, so that
            sites send each other as much as if each had one rank (docs/two-levels.md).
        transport: how the sites reach each other: `og.TorchDistributed()`, by the process group of
            torch.distributed, if None; `og.Star(kit=...)` around a hub; or an object of your own
            with the methods of `outergrad.core.transport.Transport` (docs/extending.md).
        recorder: receives events of the steps: `og.JSONL(path)`, `og.TensorBoard(dir)`,
            `og.WandB(run)`, any object with a method `record(event)` that takes `og.events`, or a
            list of them.
        rules: rules by layer type, which say how a layer's gradient factors; `og.RULES` if None,
            `{**og.RULES, MyLayer: MyRule()}` with one of your own.
        timeout: seconds, or a timedelta, that a site waits for a message before it gives up and
            raises `og.SiteLostError`; None for the timeout of the process group, by PyTorch's
            default 30 minutes. It must be longer than the time by which sites differ in arriving
            at a step. NCCL uses the group's timeout.
        max_bad_steps: skip a step on all sites if the gradient of one has NaN or infinities. After
            `backward()` every `param.grad` is None then, so that the optimizer leaves everything
            as it is. After more such steps in a row than this, `og.BadStepsError` is raised. None:
            such gradients are applied, as with DDP. Leave it None with a GradScaler, which skips
            by itself, on all sites alike.
        weighting: "sites": every site counts alike, as with DDP; "samples": a site counts by the
            number of its samples, so that the gradient is that of one large batch, whatever the
            sites' own batch sizes. See `Session.samples`.
        buffers: how buffers that forwards write to, such as running statistics, are shared in
            every shared step: "broadcast": all sites get rank 0's, as with DDP; "mean": floating
            ones become their mean by the weights of the gradients, others rank 0's; "local": each
            site keeps its own. Buffers that nobody writes to cost nothing.
        verify_every: number of shared steps that count after which the sites compare checksums of
            all shared parameters and buffers; None for never. Processors of different instruction
            sets round differently, so that replicas may drift apart.
        on_drift: what to do if replicas differ: "raise" `og.DriftError` on all sites, "warn", or
            "mend": all sites take site 0's, with the states of optimizers, and warn.
        transform: changes this site's own gradient before any of it travels, for instance for
            privacy: see `og.GradientTransform`.
        tap: listener that is told of everything that this site sends, decoded as its receivers
            decode it, and of who receives it: any object with a method `sent(sent)`, see `og.Tap`;
            `og.FileTap(path)` writes it to a file for `outergrad audit --recorded`. It changes no
            byte and no gradient, and costs a decoding of each message, and what it does itself.
            Each site may have one or not. With `mesh=` each rank has its own, for its share of what
            leaves the site. A single site sends nothing.

    Returns:
        The session: `no_sync()`, `coverage()`, `stats()`, `flush()`, `join()`, `samples()`,
        `make_equal()`, `state_dict()`, `load_state_dict()`, `detach()`.

    Raises:
        TypeError: an argument is of a wrong type, as a model that is no module.
        ValueError: the model or the method cannot be used, or the transport cannot do what the
            method needs, or the sites differ: the same message on every site, naming the first
            difference and the rank that has it.
        RuntimeError: there is no process group, or another transport lacks what it needs.
        SiteLostError: another site does not arrive, or is gone.
    """
    # Raised at once: without these this site cannot reach the others to tell them of an error.
    refuse_transport(transport)
    if transport is None:  # for another transport `opened` checks that it goes by them
        refuse_group(group)
        refuse_mesh(mesh)
    rules = RULES if rules is None else rules
    error, not_auto, span, device = None, "", None, torch.device("cpu")
    try:
        refuse_model(model)
        model = _uncompiled(model)
        device = _device(model)
        span = time_span(timeout)
    except (ValueError, TypeError) as raised:
        error = raised
    try:
        topology = _topology(transport, group, mesh, device, span)
    except (ValueError, RuntimeError):
        if error is not None:
            raise error from None
        raise
    comm = topology.site
    if method is None:
        goes_on = comm.min_sites is not None
        method, not_auto = usual_method(mesh=mesh, transform=transform, goes_on=goes_on)
    refuse_lost(comm.key)
    inspection, recorders, data_drift = None, (), None
    try:
        if error is not None:
            raise error
        refuse_inference_mode()
        refuse_rules(rules)
        refuse_max_bad_steps(max_bad_steps)
        recorders = recorders_of(recorder)
        check_transform(transform)
        refuse_tap(tap, mesh)
        refuse_gossip(
            method,
            comm,
            mesh=mesh,
            transform=transform,
            tap=tap,
            max_bad_steps=max_bad_steps,
            weighting=weighting,
            buffers=buffers,
            verify_every=verify_every,
        )
        by_sample = transform is not None and transform.needs_samples
        captured = capturing(method, transform)
        inspection = topology.look_at(model, captured, rules, by_sample=by_sample)
        refuse_incapable(repr(method), inspection.compressors, comm)
        kept = (buffers or topology.buffers) == "local"
        about = {"keeps": kept, "weighting": weighting}
        refuse_unfit(transform, model, method, inspection, **about)
        topology.refuse_settings(
            weighting=weighting,
            max_bad_steps=max_bad_steps,
            buffers=buffers,
            verify_every=verify_every,
            on_drift=on_drift,
            transform=transform,
        )
        check_settings(inspection.every, weighting, buffers, verify_every, on_drift)
        refuse_to_go_on(comm, method, inspection)
        refuse_quorum(method, comm, transform=transform, max_bad_steps=max_bad_steps)
        data_drift = drift_of(method, inspection, mesh=mesh, transform=transform, tap=tap)
    except (ValueError, TypeError) as raised:
        error = raised
    # Other sessions of the transport have to be in step before this one sends anything on it.
    end_unfinished(comm.key)
    lines = [] if inspection is None else describe(model, method, inspection)
    lines += [f"session {count_session(comm.key)} of the group", f"weighting: {weighting}"]
    lines += [f"buffers: {buffers}", f"max_bad_steps: {max_bad_steps}"]
    lines += [f"verify_every: {verify_every}, on_drift: {on_drift}", f"transform: {transform!r}"]
    handed_over = None
    with lost_sites_told(comm, "og.distribute on all sites"):
        if comm.rank in comm.coming:
            agreed, handed_over = _told_by_others(comm, lines, error)
            assert inspection is not None
            settle_again(inspection.compressors, inspection.model, comm)
        else:
            agreed = topology.agree([*lines, *transport_lines(comm)], error)
            assert inspection is not None
            tensors = topology.make_equal(model, inspection)
            _settle(inspection, comm, lambda: measured_link(comm), lambda: measured_flops(comm))
            all_came(comm, combined(checksums(tensors)))
    guarded = None
    if tap is not None:
        from outergrad.record.taps import GuardedTap

        comm.tap = guarded = GuardedTap(tap)
    counted, kind = Weighting(weighting), buffers or topology.buffers
    if is_gossip(method):  # there is no step in which all could share them
        kind = "local"
    settings = Settings(
        method=repr(method),
        lines=lines,
        not_auto=not_auto,
        recorders=recorders,
        max_bad_steps=max_bad_steps,
        weighting=counted,
        buffers=SharedBuffers(model, kind, inspection.local_buffers, _averaged(method, inspection)),
        verify_every=verify_every,
        on_drift=on_drift,
        transform=transform,
        origin=origin_of(model) if recorders else {},
        tap=guarded if guarded is not None and guarded.follows_steps else None,
        drift=data_drift,
    )
    with _all_or_nothing(model, comm):
        session = topology.session(inspection, agreed, settings, method)
        session.tap(inspection)
        if settings.tap is not None:
            settings.tap.attached(_tapped(model, method, session, settings))
        counted.watch(model)
        session.watch(model, inspection.watch)
    say_farewell(comm, agreed)
    if comm.board is not None and not is_gossip(method):  # which waits for no other site
        on_transport(comm.key).watch(comm)
    if handed_over is not None:
        session.take(handed_over)
    return session


@contextmanager
def _all_or_nothing(model: nn.Module, comm: Comm) -> Iterator[None]:
    """Restores the plain model if the block raises: classes, hooks, registered sessions."""
    classes = [(module, type(module)) for module in model.modules()]
    attached = on_transport(comm.key).attached
    before = set(attached)
    try:
        yield
    except BaseException:
        for module, plain in classes:
            if type(module) is not plain:
                module.__class__ = plain
        for p in model.parameters():
            unclaim(p)
        for session in set(attached) - before:
            attached.discard(session)
            look_away(session)
        raise


def _told_by_others(
    comm: Comm, lines: Sequence[str], error: Exception | None
) -> tuple[int, Handover]:
    """Receives the others' fingerprint and handover, on a site that joins while they train.

    Raises:
        ValueError: this site's description differs from theirs.
        SiteLostError: the exchange failed. The others go on without this site, which leaves no
            farewell.
    """
    try:
        sealed = comm.sealed()
        agree(sealed, [*lines, *transport_lines(comm)], error)
        found = taken(sealed)
    except ExchangeError as failed:
        comm.close()
        told = f"the others could not take this site in ({failed}): start it again"
        raise SiteLostError(told, failed.sites, 0, "what the others have") from failed
    return found.number, found


def _settle(
    inspection: Inspection,
    comm: Comm,
    measured: Callable[[], Link],
    flops_per_s: Callable[[], float],
) -> None:
    settle(inspection.compressors, inspection.model, comm, measured, flops_per_s)


def _topology(
    transport: Transport | None,
    group: dist.ProcessGroup | None,
    mesh: Mesh | None,
    device: torch.device,
    timeout: timedelta | None,
) -> Topology:
    way = TorchDistributed() if transport is None else transport
    if mesh is None:
        return Topology(opened(way, device, group, timeout))
    if group is not None:
        raise ValueError("mesh= and group= both say who takes part: pass one of them")
    if "group" not in way.settings:
        raise ValueError(
            f"mesh= with transport={type(way).__name__}: a mesh is made of process groups, by "
            f"which that does not go; leave one of them out"
        )
    from outergrad.session.mesh.topology import MeshTopology

    return MeshTopology(mesh, levels_of(mesh, lambda ranks: opened(way, device, ranks, timeout)))


def _uncompiled(model: nn.Module) -> nn.Module:
    """Returns the module inside `torch.compile(model)`, whose parameter names have no prefix."""
    # By the name of the class: importing it takes a second.
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model  # type: ignore[return-value]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _tapped(model: nn.Module, method: object, session: Session, settings: Settings) -> TappedRun:
    comm = session.transport()
    return TappedRun(
        model=model,
        weights=session.shared,
        method=settings.method,
        local_steps=method.fewest if isinstance(method, LocalSteps) else None,
        site=comm.rank,
        sites=comm.world_size,
        transform="" if settings.transform is None else repr(settings.transform),
    )


def _averaged(method: object, inspection: Inspection) -> Collection[str]:
    """Frozen parameters to share as buffers: with `og.LocalSteps` loops average weights there."""
    return inspection.frozen if isinstance(method, LocalSteps) else ()


def attach(
    model: nn.Module,
    method: Method,
    comm: Comm,
    link: Link,
    rules: Rules = RULES,
    buffers: _buffers.Kind = "local",
) -> Session:
    """Distributes a model over a given transport, without comparing the sites first.

    Args:
        model: as for `distribute`.
        method: as for `distribute`.
        comm: the transport; nothing is sent before the first step.
        link: link of the slowest site, for methods that depend on it.
        rules: as for `distribute`.
        buffers: as for `distribute`; its bytes come on top of those of the method.

    Raises:
        ValueError: the model or the method cannot be used.
    """
    inspection = inspect(model, method, rules)
    refuse_incapable(repr(method), inspection.compressors, comm)
    _settle(inspection, comm, lambda: link, lambda: math.inf)
    shared = SharedBuffers(model, buffers, inspection.local_buffers)
    settings = Settings(method=repr(method), buffers=shared)
    agreed = fingerprint(describe(model, method, inspection))
    with _all_or_nothing(model, comm):
        session = Session(inspection, comm, agreed, settings)
        session.tap(inspection)
    return session
