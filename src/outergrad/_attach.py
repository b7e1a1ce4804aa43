"""distribute(): look at the model, agree with the other sites, swap the classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from outergrad._groups import count_session, end_unfinished
from outergrad._model import Model
from outergrad._protocols import Exchange, Method, Recorder, Rule, Rules
from outergrad._session import Session
from outergrad._tap import TappedLayer, is_watched
from outergrad._types import Slot
from outergrad._version import __version__
from outergrad.comm.agree import agree, broadcast_all
from outergrad.comm.link import measured_link
from outergrad.comm.torch import TorchComm
from outergrad.comm.wire import DTYPES
from outergrad.exchange import DAD
from outergrad.layers import RULES, rule_for

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def distribute(
    model: nn.Module,
    method: Method | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    recorder: Recorder | None = None,
    rules: Rules = RULES,
) -> Session:
    """Shares the gradients of a model between the sites of a process group, in place.

    Afterwards every `loss.backward()` leaves in each `param.grad` the mean over the sites of their
    local gradients, as `DistributedDataParallel` does; model, optimizer and training loop stay as
    they are. Parameters and buffers are first made equal to rank 0's. Call it on every site of the
    group, at the same point of the program.

    Args:
        model: any module, not wrapped; its parameters on one device.
        method: how gradients travel: `og.DAD()` by default, or `og.Dense()`.
        group: the sites; the default group if None.
        recorder: an object whose `record(event)` is called per layer and step with an `Event`.
        rules: what is known about layer types; extend by `{**og.RULES, MyLayer: MyRule()}`.

    Returns:
        The session: `no_sync()`, `coverage()`, `stats()`, `state_dict()`, `load_state_dict()`,
        `detach()`.

    Raises:
        ValueError: the model or the method cannot be used, or the sites differ: the same message
            on every site, naming the first difference and the rank that has it.
        RuntimeError: there is no process group.
    """
    method = DAD() if method is None else method
    comm = TorchComm(_group(group), _device(model))
    error, view = None, None
    try:
        view = _inspect(model, method, rules)
    except (ValueError, TypeError) as raised:
        error = raised
    end_unfinished(comm.group)
    number = f"session {count_session(comm.group)} of the group"
    lines = [] if view is None else [*_describe(model, method, view), number]
    fingerprint = agree(comm, lines, error)
    assert view is not None
    broadcast_all(comm, [*model.parameters(), *model.buffers()])
    _settle_reduce(view, comm)
    return _attach(view, comm, fingerprint, recorder, repr(method))


@dataclass(frozen=True)
class _Layer:
    module: nn.Module
    rule: Rule
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class _View:
    """What a look at the model found."""

    model: Model
    frozen: dict[str, nn.Parameter]
    layers: list[_Layer]
    exchange: Exchange | None


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


def _inspect(model: nn.Module, method: Method, rules: Rules) -> _View:
    """Finds slots and reasons; raises ValueError for what cannot be distributed."""
    _check_model(model)
    if not callable(getattr(method, "exchange", None)):
        raise TypeError(f"method={method!r}: pass og.DAD(...) or og.Dense()")
    names = {id(p): name for name, p in model.named_parameters()}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    exchange = method.exchange()
    reasons = dict.fromkeys(trained, "the method is dense")
    layers: list[_Layer] = []
    if exchange is not None:
        reasons = dict.fromkeys(trained, "a plain parameter")
        layers = list(_layers(model, rules, names, trained, reasons))
    covered = {name for layer in layers for slot in layer.slots for name in slot.params}
    reasons = {name: why for name, why in reasons.items() if name not in covered}
    plain = [n for n in reasons if exchange and exchange.takes_plain and _is_matrix(trained[n])]
    slots = [slot for layer in layers for slot in layer.slots]
    shared = Model.of(trained, slots, reasons, plain)
    if exchange is not None:
        exchange.refuse(shared.units)
    return _View(shared, frozen, layers, exchange)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        if bases & set(_WRAPPERS):
            raise ValueError(
                f"{name or 'the model'!r} is wrapped in {type(module).__name__}, which shares its "
                f"gradients itself: pass the plain module to og.distribute()"
            )
    params = dict(model.named_parameters())
    if not any(p.requires_grad for p in params.values()):
        raise ValueError("the model has no parameter that requires a gradient")
    _check_parameters(params)
    for name, buffer in model.named_buffers():
        if any(
            stride == 0 and size > 1
            for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
        ):
            raise ValueError(f"buffer {name!r} is expanded: register a .contiguous() copy of it")


def _check_parameters(params: dict[str, nn.Parameter]) -> None:
    first, home = next(iter(params.items()))
    for name, p in params.items():
        if is_watched(p):
            raise ValueError(f"{name!r} is distributed already: call session.detach() first")
        if type(p).__name__ == "DTensor":  # by name: its import costs half a second
            raise ValueError(f"{name!r} is a DTensor: sharded models are not supported")
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet: run one forward of the lazy module first")
        if p.device != home.device:
            raise ValueError(
                f"{name!r} is on {p.device}, {first!r} on {home.device}: a model must be on one "
                f"device"
            )


def _layers(
    model: nn.Module,
    rules: Rules,
    names: dict[int, str],
    trained: dict[str, nn.Parameter],
    reasons: dict[str, str],
) -> Iterator[_Layer]:
    """Layers with a rule; for the others' parameters, fills in the reasons."""
    owned: set[int] = set()
    for prefix, module in model.named_modules():
        if id(module) in owned:
            continue
        rule, why = _rule(prefix, module, rules)
        if rule is None:
            reasons.update({n: why for n in _own(module, names) if reasons.get(n) == _PLAIN})
            continue
        slots = _named_slots(rule, module, prefix, names)
        owned |= {id(getattr(module, child)) for child in rule.owns}
        why = _unfit(slots, trained)
        if why:
            reasons.update({n: why for slot in slots for n in slot.params if n in reasons})
        else:
            yield _Layer(module, rule, slots)


_PLAIN = "a plain parameter"


def _rule(prefix: str, module: nn.Module, rules: Rules) -> tuple[Rule | None, str]:
    try:
        return rule_for(module, rules)
    except ValueError as error:
        raise ValueError(f"{prefix or type(module).__name__}: {error}") from None


def _own(module: nn.Module, names: dict[int, str]) -> list[str]:
    return [names[id(p)] for p in module.parameters(recurse=False)]


def _named_slots(
    rule: Rule, module: nn.Module, prefix: str, names: dict[int, str]
) -> tuple[Slot, ...]:
    """The rule's slots, with tied parameters under their first name."""
    own = {f"{prefix}.{n}" if prefix else n: names[id(p)] for n, p in module.named_parameters()}
    slots = rule.slots(module, prefix)
    return tuple(_renamed(slot, own) for slot in slots)


def _renamed(slot: Slot, own: dict[str, str]) -> Slot:
    bias = None if slot.bias is None else own[slot.bias]
    return Slot(**{**vars(slot), "weight": own[slot.weight], "bias": bias})


def _unfit(slots: tuple[Slot, ...], trained: dict[str, nn.Parameter]) -> str:
    params = [trained.get(name) for slot in slots for name in slot.params]
    if any(p is None for p in params):
        return "part of the layer is frozen"
    if any(p is not None and p.dtype not in DTYPES for p in params):
        return "no rule for its dtype"
    return ""


def _is_matrix(p: nn.Parameter) -> bool:
    return p.dim() >= 2 and p.numel() > 0 and p.dtype in DTYPES


def _describe(model: nn.Module, method: Method, view: _View) -> list[str]:
    """What the sites must have in common, a line each."""
    lines = [
        f"outergrad {__version__}",
        f"torch {torch.__version__}",
        f"method: {method!r}",
    ]
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, t in tensors:
            trained = ", trained" if t.requires_grad else ""
            lines.append(f"{kind} {name}: {tuple(t.shape)} {t.dtype}{trained}")
    return lines + [str(slot) for slot in view.model.slots]


def _settle_reduce(view: _View, comm: TorchComm) -> None:
    """Measures the link where the method goes by it."""
    exchange, sites = view.exchange, comm.world_size
    if exchange is not None and exchange.wants_link(sites):
        exchange.settle_reduce(view.model.units, sites, measured_link(comm))


def _attach(
    view: _View, comm: TorchComm, fingerprint: int, recorder: Recorder | None, method: str
) -> Session:
    session = Session(view.model, view.frozen, comm, view.exchange, fingerprint, recorder, method)
    for layer in view.layers:
        watched = [session.watched(slot) for slot in layer.slots]
        session.attach(TappedLayer(layer.module, layer.rule, layer.slots, watched, session))
    return session
