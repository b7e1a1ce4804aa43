"""distribute(): look at the model, agree with the other sites, swap the classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad._block_tap import TappedBlock
from outergrad._blocks_found import FoundBlock
from outergrad._groups import count_session, end_unfinished
from outergrad._inspect import View, inspect
from outergrad._local_steps import LocalStepsSession
from outergrad._own_parameters import OwnParameters
from outergrad._protocols import Comm, Method, Recorder, Rules
from outergrad._recorders import Recorders, recorders_of
from outergrad._session import Session
from outergrad._tapped_layer import TappedLayer
from outergrad._types import Link
from outergrad._version import __version__
from outergrad.comm.agree import agree, broadcast_all, fingerprint
from outergrad.comm.link import measured_link
from outergrad.comm.torch import TorchComm
from outergrad.exchange import DAD, LocalSteps, PerLayer
from outergrad.layers import RULES


def distribute(
    model: nn.Module,
    method: Method | PerLayer | LocalSteps | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    recorder: Recorders = None,
    rules: Rules = RULES,
) -> Session:
    """Shares the gradients of a model between the sites of a process group, in place.

    Afterwards every `loss.backward()` leaves in each `param.grad` the mean over the sites of their
    local gradients, as `DistributedDataParallel` does; model, optimizer and training loop stay as
    they are. Parameters and buffers are first made equal to rank 0's. Call it on every site of the
    group, at the same point of the program.

    Args:
        model: any module, not wrapped; its parameters on one device.
        method: how gradients travel: `og.DAD()` by default; `og.PerLayer({...})` for a method per
            part of the model, `og.Local()` for a part that is not shared; `og.LocalSteps(k)` to
            share not gradients but what k steps of each site have changed.
        group: the sites; the default group if None.
        recorder: is told of steps: `og.JSONL(path)`, `og.TensorBoard(dir)`, `og.WandB(run)`, any
            object with a method `record(event)` that takes `og.events`, or a list of them.
        rules: what is known about layer types; extend by `{**og.RULES, MyLayer: MyRule()}`.

    Returns:
        The session: `no_sync()`, `coverage()`, `stats()`, `flush()`, `state_dict()`,
        `load_state_dict()`, `detach()`.

    Raises:
        ValueError: the model or the method cannot be used, or the sites differ: the same message
            on every site, naming the first difference and the rank that has it.
        RuntimeError: there is no process group.
    """
    method = DAD() if method is None else method
    comm = TorchComm(_group(group), _device(model))
    error, view, recorders = None, None, ()
    try:
        recorders = recorders_of(recorder)
        view = _inspect(model, method, rules)
    except (ValueError, TypeError) as raised:
        error = raised
    end_unfinished(comm.group)
    number = f"session {count_session(comm.group)} of the group"
    lines = [] if view is None else [*_describe(model, method, view), number]
    agreed = agree(comm, lines, error)
    assert view is not None
    broadcast_all(comm, [t for _, _, t in _shared_tensors(model, view)])
    _settle_reduce(view, comm.world_size, lambda: measured_link(comm))
    if isinstance(method, LocalSteps):
        return LocalStepsSession(view, comm, agreed, recorders, method)
    return _attach(view, comm, agreed, recorders, repr(method))


def _inspect(model: nn.Module, method: Method | PerLayer | LocalSteps, rules: Rules) -> View:
    """What is shared; a change of the weights has no factors, so that no rule is of use for it."""
    if isinstance(method, LocalSteps):
        return inspect(model, method.method, {})
    return inspect(model, method, rules)


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


def _describe(model: nn.Module, method: object, view: View) -> list[str]:
    """What the sites must have in common, a line each."""
    lines = [
        f"outergrad {__version__}",
        f"torch {torch.__version__}",
        f"method: {method!r}",
    ]
    for kind, name, t in _shared_tensors(model, view):
        trained = ", trained" if t.requires_grad else ""
        lines.append(f"{kind} {name}: {tuple(t.shape)} {t.dtype}{trained}")
    lines += [f"block {found.names}" for found in view.blocks]
    return lines + [str(slot) for slot in view.model.slots]


def _shared_tensors(model: nn.Module, view: View) -> list[tuple[str, str, Tensor]]:
    """Parameters and buffers that are no site's own: what each is, its name, itself."""
    parameters = (("parameter", n, p) for n, p in model.named_parameters() if n not in view.local)
    buffers = model.named_buffers()
    own = view.local_buffers
    return [*parameters, *(("buffer", n, t) for n, t in buffers if n not in own)]


def _settle_reduce(view: View, sites: int, measured: Callable[[], Link]) -> None:
    """Measures the link, once, where a method goes by it."""
    asking = [(e, units) for e, units in view.exchanges.items() if e.wants_link(sites)]
    link = measured() if asking else None
    for exchange, units in asking:
        assert link is not None
        exchange.settle_reduce(units, sites, link)


def attach(
    model: nn.Module, method: Method, comm: Comm, link: Link, rules: Rules = RULES
) -> Session:
    """Distributes a model over a transport of any kind, whose sites are known to be alike.

    Args:
        model: as for `distribute`.
        method: as for `distribute`.
        comm: the transport; nothing is sent before the first step.
        link: what the slowest site has, for methods that go by it.
        rules: as for `distribute`.

    Raises:
        ValueError: the model or the method cannot be used.
    """
    view = inspect(model, method, rules)
    _settle_reduce(view, comm.world_size, lambda: link)
    return _attach(view, comm, fingerprint(_describe(model, method, view)), (), repr(method))


def _attach(
    view: View, comm: Comm, agreed: int, recorders: Sequence[Recorder], method: str
) -> Session:
    session = Session(view, comm, agreed, recorders, method)
    for layer in view.layers:
        watched = [session.watched(slot.params) for slot in layer.slots]
        session.attach(TappedLayer(layer.module, layer.rule, layer.slots, watched, session))
    for found in view.blocks:
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
