"""What a look at the model finds: who shares what, layers with a rule, reasons for the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import is_claimed
from outergrad.core.blocks import Block
from outergrad.core.model import Exchanges, Model
from outergrad.core.protocols import Exchange, Rule, Rules
from outergrad.core.types import Slot
from outergrad.layers import rule_for
from outergrad.messages.header import DTYPES
from outergrad.methods import Local, PerLayer
from outergrad.replay.blocks_found import BlockFinder, FoundBlock
from outergrad.replay.host import Host
from outergrad.session.assignment import Assignment
from outergrad.step.joint import joint_parts

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_PLAIN = "a plain parameter"


@dataclass(frozen=True)
class Layer:
    """A module with a rule.

    Attributes:
        module: the module.
        rule: how it computes.
        slots: its outer products.
    """

    module: nn.Module
    rule: Rule
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Inspection:
    """What a look at the model found.

    Attributes:
        model: the trainable part that is shared.
        exchanges: of its units.
        layers: whose classes are to be swapped.
        blocks: what is computed again by all sites.
        frozen: shared parameters that are not trained.
        local: parameters that each site keeps to itself.
        local_buffers: names of buffers that it does, too.
        joint_parts: modules whose outputs' deltas are averaged over the sites, by name.
        every: of each trained one, at every how many-th synchronised backward it travels.
        watch: tells whether the model has changed since.
        norms_over_sites: names of `SyncBatchNorm`s, of which every forward is a meeting.
    """

    model: Model
    exchanges: Exchanges
    layers: list[Layer]
    blocks: list[FoundBlock]
    frozen: dict[str, nn.Parameter]
    local: dict[str, nn.Parameter]
    local_buffers: frozenset[str]
    joint_parts: dict[str, nn.Module]
    every: dict[str, int]
    watch: ModelWatch
    norms_over_sites: tuple[str, ...] = ()


def inspect(model: nn.Module, method: Any, rules: Rules) -> Inspection:
    """Finds slots and reasons.

    Raises:
        ValueError: the model cannot be distributed so.
        TypeError: the method is none.
    """
    _check_model(model)
    params = dict(model.named_parameters())
    assignment = Assignment(method, list(params))
    local = {n: p for n, p in params.items() if assignment.is_local(n)}
    shared = {n: p for n, p in params.items() if n not in local}
    frozen = {n: p for n, p in shared.items() if not p.requires_grad}
    trained = {n: p for n, p in shared.items() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no shared parameter that requires a gradient")
    dense = [n for n in trained if assignment.exchange_of(n) is None]
    reasons = dict.fromkeys(trained, _PLAIN) | dict.fromkeys(dense, "the method is dense")
    names = {id(p): name for name, p in params.items()}
    hosts: dict[int, Host] = {}
    finders = [_finder(model, e, trained, assignment, hosts) for e in assignment.exchanges]
    blocks = [block for finder in finders for block in finder.found()]
    owned = {key for finder in finders for key in finder.owned}
    layers = list(_layers(model, rules, names, trained, reasons, owned))
    for slot in (slot for layer in layers for slot in layer.slots):
        assignment.check_together(slot.params)
    shared_model = _model(trained, layers, [b.block for b in blocks], reasons, assignment)
    exchanges = Exchanges(assignment.units_of(shared_model.units))
    for exchange, units in exchanges.items():
        exchange.refuse(units)
    buffers = _local_buffers(model, method)
    every = {name: assignment.every(name) for name in trained}
    joint = isinstance(method, PerLayer) and method.joint
    parts = joint_parts(model, list(local)) if joint else {}
    norms = tuple(n for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm))
    watch = ModelWatch(model, trained, local, lambda name: is_local(method, name))
    found = (shared_model, exchanges, layers, blocks, frozen, local, buffers, parts, every, watch)
    return Inspection(*found, norms)


def _finder(
    model: nn.Module,
    exchange: Exchange,
    trained: dict[str, nn.Parameter],
    assignment: Assignment,
    hosts: dict[int, Host],
) -> BlockFinder:
    own = {id(p): n for n, p in trained.items() if assignment.exchange_of(n) is exchange}
    return BlockFinder(model, exchange, own, hosts)


def _model(
    trained: dict[str, nn.Parameter],
    layers: list[Layer],
    blocks: list[Block],
    reasons: dict[str, str],
    assignment: Assignment,
) -> Model:
    slots = [slot for layer in layers for slot in layer.slots]
    covered = {name for part in (*slots, *blocks) for name in part.params}
    reasons = {name: why for name, why in reasons.items() if name not in covered}
    plain = [n for n in reasons if _travels_plain(assignment, n) and _is_matrix(trained[n])]
    return Model.of(trained, slots, reasons, plain, blocks)


def _travels_plain(assignment: Assignment, name: str) -> bool:
    exchange = assignment.exchange_of(name)
    return exchange is not None and exchange.takes_plain


def _local_buffers(model: nn.Module, method: Any) -> frozenset[str]:
    if not isinstance(method, PerLayer):
        return frozenset()
    return frozenset(name for name, _ in model.named_buffers() if is_local(method, name))


def is_local(method: Any, name: str) -> bool:
    """Whether what has this name is each site's own."""
    return isinstance(method, PerLayer) and isinstance(method.method_of(name), Local)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        if "FSDPModule" in bases:
            raise ValueError(
                f"{name or 'the model'!r} is sharded by FSDP2 (fully_shard), whose ranks have "
                f"no whole gradient to share: pass mesh= with the dimensions 'site' and 'local' "
                f"(docs/two-levels.md)"
            )
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
        if is_claimed(p):
            raise ValueError(f"{name!r} is distributed already: call session.detach() first")
        if type(p).__name__ == "DTensor":  # by name: its import costs half a second
            raise ValueError(
                f"{name!r} is a DTensor, but its module is not one of fully_shard(): of sharded "
                f"models only those of FSDP2 are supported (docs/two-levels.md)"
            )
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
    owned: set[int],
) -> Iterator[Layer]:
    """Layers with a rule that are not owned; for the others' parameters, fills in the reasons."""
    for prefix, module in model.named_modules():
        if id(module) in owned:
            continue
        rule, why = _rule(prefix, module, rules)
        if rule is None:
            reasons.update({n: why for n in _own(module, names) if reasons.get(n) == _PLAIN})
            continue
        slots = _named_slots(rule, module, prefix, names)
        owned |= {id(getattr(module, child)) for child in rule.owns}
        if not any(reasons.get(name) == _PLAIN for slot in slots for name in slot.params):
            continue
        why = _unfit(slots, trained)
        if why:
            names_ = [n for slot in slots for n in slot.params]
            reasons.update({n: why for n in names_ if reasons.get(n) == _PLAIN})
        else:
            yield Layer(module, rule, slots)


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
        return "part of the layer is frozen or local"
    if any(p is not None and p.dtype not in DTYPES for p in params):
        return "no rule for its dtype"
    return ""


def _is_matrix(p: nn.Parameter) -> bool:
    return p.dim() >= 2 and p.numel() > 0 and p.dtype in DTYPES
