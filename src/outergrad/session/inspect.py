"""Inspection of a model: what is shared, layers with a rule, why other parameters travel dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import is_claimed
from outergrad.capture.class_swap import is_swappable
from outergrad.capture.wrappers import WRAPPERS
from outergrad.core.compressor import Compressor
from outergrad.core.model import Compressors, Model
from outergrad.core.protocols import Rule, Rules
from outergrad.core.types import Slot
from outergrad.drift.on_drift import OnDrift
from outergrad.layers import rule_for
from outergrad.layers.by_sample import with_bare
from outergrad.layers.embedding import MAX_NORM_REFUSED, SPARSE_REFUSED
from outergrad.messages.header import DTYPES
from outergrad.messages.raw import has_elements
from outergrad.methods.assignment import Assignment, is_local
from outergrad.methods.per_layer import PerLayer
from outergrad.planning.changing import ChangingCompressors
from outergrad.planning.chosen import ChosenCompressors
from outergrad.replay.block_tap import FoundBlock
from outergrad.replay.blocks_found import BlockFinder
from outergrad.replay.host import Host
from outergrad.step.joint import joint_parts


@dataclass(frozen=True)
class FoundLayer:
    """Module with a rule.

    Attributes:
        module: the module.
        rule: the rule of its type.
        slots: its outer products.
    """

    module: nn.Module
    rule: Rule
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Inspection:
    """Result of the inspection of a model.

    Attributes:
        model: the trainable part that is shared.
        compressors: of the model's units.
        layers: layers whose classes are to be swapped.
        blocks: blocks that all sites compute again (replays).
        frozen: shared parameters that are not trained.
        local: parameters that each site keeps to itself.
        local_buffers: names of buffers that each site keeps to itself.
        joint_parts: modules whose outputs' deltas are averaged over the sites, by name.
        every: k of each trained parameter, which travels at every k-th synchronised backward, or
            the drift on which it does.
        watch: tells whether the model has changed since.
        norms_over_sites: names of `SyncBatchNorm`s, whose forward is a collective of all sites.
    """

    model: Model
    compressors: Compressors
    layers: list[FoundLayer]
    blocks: list[FoundBlock]
    frozen: dict[str, nn.Parameter]
    local: dict[str, nn.Parameter]
    local_buffers: frozenset[str]
    joint_parts: dict[str, nn.Module]
    every: dict[str, int | OnDrift]
    watch: ModelWatch
    norms_over_sites: tuple[str, ...] = ()


def inspect(
    model: nn.Module,
    method: Any,
    rules: Rules,
    *,
    replays: bool = True,
    by_sample: bool = False,
) -> Inspection:
    """Inspects a model that is to be distributed.

    Args:
        model: the model.
        method: the user's method.
        rules: rules by type of layer.
        replays: whether sites can compute parts of the model again for each other. Otherwise the
            method treats these parts as other layers.
        by_sample: whether gradients of samples are to be told apart, also those of parameters
            without a rule.

    Raises:
        ValueError: the model cannot be distributed by the method.
        TypeError: `method` is no method.
    """
    _check_model(model)
    look = _Look(model, method, rules, by_sample=by_sample)
    blocks = look.blocks() if replays and not look.assignment.changes else []
    layers = list(look.layers())
    for slot in (slot for layer in layers for slot in layer.slots):
        look.assignment.check_together(slot.params)
    shared = look.shared_model([slot for layer in layers for slot in layer.slots], blocks)
    compressors = look.compressors(shared)
    for compressor, units in compressors.items():
        compressor.refuse(units)
    joint = isinstance(method, PerLayer) and method.joint
    modules = model.named_modules()
    return Inspection(
        model=shared,
        compressors=compressors,
        layers=layers,
        blocks=blocks,
        frozen=look.frozen,
        local=look.local,
        local_buffers=frozenset(n for n, _ in model.named_buffers() if is_local(method, n)),
        joint_parts=joint_parts(model, list(look.local)) if joint else {},
        every={name: look.assignment.every(name) for name in look.trained},
        watch=ModelWatch(model, look.trained, look.local, lambda name: is_local(method, name)),
        norms_over_sites=tuple(n for n, m in modules if isinstance(m, nn.SyncBatchNorm)),
    )


class _Look:
    """One inspection of a model.

    Attributes:
        assignment: of methods to the parameters.
        local: parameters that each site keeps to itself.
        frozen: shared parameters that are not trained.
        trained: shared parameters that are trained.
    """

    def __init__(
        self, model: nn.Module, method: Any, rules: Rules, *, by_sample: bool = False
    ) -> None:
        self._model, self._rules, self._by_sample = model, rules, by_sample
        params = dict(model.named_parameters())
        buffers = [name for name, _ in model.named_buffers()]
        self.assignment = Assignment(method, list(params), buffers)
        self.local = {n: p for n, p in params.items() if self.assignment.is_local(n)}
        shared = {n: p for n, p in params.items() if n not in self.local}
        self.frozen = {n: p for n, p in shared.items() if not p.requires_grad}
        self.trained = {n: p for n, p in shared.items() if p.requires_grad}
        if not self.trained:
            raise ValueError("the model has no shared parameter that requires a gradient")
        self._names = {id(p): name for name, p in params.items()}
        self._owned: set[int] = set()
        self._reasons = dict.fromkeys(self.trained, "a plain parameter")
        dense = [n for n in self.trained if self.assignment.exchange_of(n) is None]
        self._reasons.update(dict.fromkeys(dense, "the method is dense"))
        self._open = self.trained.keys() - dense  # no module has given a reason yet

    def blocks(self) -> list[FoundBlock]:
        """Finds the blocks that are computed again; their modules are no `FoundLayer`s."""
        hosts: dict[int, Host] = {}
        finders = [self._finder(compressor, hosts) for compressor in self.assignment.compressors]
        found = [block for finder in finders for block in finder.found()]
        self._owned = {key for finder in finders for key in finder.owned}
        return found

    def _finder(self, compressor: Compressor, hosts: dict[int, Host]) -> BlockFinder:
        of = self.assignment.exchange_of
        own = {id(p): n for n, p in self.trained.items() if of(n) is compressor}
        return BlockFinder(self._model, compressor, own, hosts)

    def layers(self) -> Iterator[FoundLayer]:
        """Yields layers with a rule that nothing else owns; notes why others travel dense."""
        for prefix, module in self._model.named_modules():
            if id(module) in self._owned or self._is_local(module):
                continue
            rule, why = self._rule(prefix, module)
            if rule is None:
                own = [self._names[id(p)] for p in module.parameters(recurse=False)]
                if self._rules and not self.trained.keys().isdisjoint(own):
                    _refuse_as_embeddings(prefix, module)
                self._note(own, why)
                continue
            slots = self._named_slots(rule, module, prefix)
            self._owned |= {id(getattr(module, child)) for child in rule.owns}
            names = [name for slot in slots for name in slot.params]
            if self._open.isdisjoint(names):
                continue
            why = self._unfit(module, names)
            if why:
                self._note(names, why)
            else:
                yield FoundLayer(module, rule, slots)

    def _is_local(self, module: nn.Module) -> bool:
        """True if the module's parameters are all the site's own: nothing of it can be refused."""
        own = [self._names[id(p)] for p in module.parameters()]
        return bool(own) and self.local.keys() >= set(own)

    def _note(self, names: Sequence[str], why: str) -> None:
        """Records why parameters travel dense; the first reason found is kept."""
        self._reasons.update(dict.fromkeys(self._open.intersection(names), why))
        self._open -= set(names)

    def _rule(self, prefix: str, module: nn.Module) -> tuple[Rule | None, str]:
        try:
            found = rule_for(module, self._rules)
        except ValueError as error:
            raise ValueError(f"{prefix or type(module).__name__}: {error}") from None
        return with_bare(*found, module, self._is_trained) if self._by_sample else found

    def _is_trained(self, p: nn.Parameter) -> bool:
        """True if the parameter is trained and shared."""
        return self._names[id(p)] in self.trained

    def _named_slots(self, rule: Rule, module: nn.Module, prefix: str) -> tuple[Slot, ...]:
        """Returns the rule's slots, with tied parameters under their first name."""
        first: dict[str | None, Any] = {None: None}
        first |= {n: self._names[id(p)] for n, p in module.named_parameters(prefix)}
        slots = rule.slots(module, prefix)
        return tuple(s._replace(weight=first[s.weight], bias=first[s.bias]) for s in slots)

    def _unfit(self, module: nn.Module, names: Sequence[str]) -> str:
        """Returns why a layer with these parameters has to travel dense; else an empty text."""
        if not self.trained.keys() >= set(names):
            return "part of the layer is frozen or local"
        if any(self.trained[name].dtype not in DTYPES for name in names):
            return "no rule for its dtype"
        if not is_swappable(module):
            return f"its class, {type(module).__name__}, allows no subclass"
        if any(self.trained[name].numel() == 0 for name in names):
            return "a part of the layer has no elements"
        return ""

    def shared_model(self, slots: Sequence[Slot], blocks: Sequence[FoundBlock]) -> Model:
        """Returns the trained part, by units, with reasons for parameters outside of them."""
        parts = [found.block for found in blocks]
        covered = {name for part in (*slots, *parts) for name in part.params}
        reasons = {name: why for name, why in self._reasons.items() if name not in covered}
        plain = [name for name in reasons if self._travels_plain(name)]
        vectors = {name for name in covered if self._is_vector(name)}
        return Model.of(self.trained, slots, reasons, plain, parts, vectors)

    def compressors(self, shared: Model) -> Compressors:
        """Returns the compressors of the units, one per method."""
        units_of = self.assignment.units_of(shared.units)
        if self.assignment.changes:
            chooser = self.assignment.chooser(shared.units)
            if chooser is not None:
                return ChosenCompressors(units_of, chooser)
            return ChangingCompressors(units_of, self.assignment.choose)
        return Compressors(units_of)

    def _travels_plain(self, name: str) -> bool:
        """True if the parameter's method takes its formed gradient, without a rule."""
        takes, p = self.assignment.takes_plain(name), self.trained[name]
        fits = p.dim() >= 2 or self._is_vector(name)
        return takes and fits and p.numel() > 0 and p.dtype in DTYPES

    def _is_vector(self, name: str) -> bool:
        """True if the parameter is a vector, and its method takes vectors."""
        return self.trained[name].dim() == 1 and self.assignment.takes_vectors(name)


def _refuse_as_embeddings(prefix: str, module: nn.Module) -> None:
    """Refuses, on modules without a rule, the settings of `nn.Embedding` that cannot be shared.

    `nn.EmbeddingBag` has them, and a subclass with a forward of its own may.

    Raises:
        ValueError: its gradients are sparse, or its forward changes its table.
    """
    name = prefix or type(module).__name__
    if getattr(module, "sparse", False) is True:
        raise ValueError(f"{name}: {SPARSE_REFUSED}")
    if isinstance(module, nn.EmbeddingBag) and module.max_norm is not None:
        raise ValueError(f"{name}: {MAX_NORM_REFUSED}")


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        if "FSDPModule" in bases:
            raise ValueError(
                f"{name or 'the model'!r} is sharded by FSDP2 (fully_shard), whose ranks have "
                f"no whole gradient to share: pass mesh= with the dimensions 'site' and 'local' "
                f"(docs/two-levels.md)"
            )
        if bases & set(WRAPPERS):
            raise ValueError(
                f"{name or 'the model'!r} is wrapped in {type(module).__name__}, which shares its "
                f"gradients itself: pass the plain module to og.distribute()"
            )
    params = dict(model.named_parameters())
    if not any(p.requires_grad for p in params.values()):
        raise ValueError("the model has no parameter that requires a gradient")
    _check_parameters(params)
    for name, buffer in model.named_buffers():
        if _is_expanded(buffer):
            raise ValueError(f"buffer {name!r} is expanded: register a .contiguous() copy of it")


def _claimed(name: str, params: dict[str, nn.Parameter]) -> str:
    if all(is_claimed(p) for p in params.values() if p.requires_grad):
        return f"{name!r} is distributed already: call session.detach() first"
    return (
        f"{name!r} is distributed already, with another model that shares it: distribute both "
        f"as one in place of each, og.distribute(torch.nn.ModuleList([first, second]))"
    )


def _is_expanded(t: Tensor) -> bool:
    """True if several elements share one place of memory."""
    if not has_elements(t):
        return False
    strides = zip(t.stride(), t.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in strides)


def _check_parameters(params: dict[str, nn.Parameter]) -> None:
    first, home = next(iter(params.items()))
    for name, p in params.items():
        if is_claimed(p):
            raise ValueError(_claimed(name, params))
        if type(p).__name__ == "DTensor":  # by name: its import costs half a second
            raise ValueError(
                f"{name!r} is a DTensor, but its module is not one of fully_shard(): of sharded "
                f"models only those of FSDP2 are supported (docs/two-levels.md)"
            )
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet: run one forward of the lazy module first")
        if p.is_meta:
            raise ValueError(
                f"{name!r} is on meta and has no values: call model.to_empty(device=...) and "
                f"initialise or load it first"
            )
        if p.requires_grad and not has_elements(p):
            kind = type(p).__name__ if p.layout == torch.strided else p.layout
            raise ValueError(
                f"{name!r} is trained and a {kind}, whose gradient has no elements to share: "
                f"freeze it (requires_grad=False), or make it a plain nn.Parameter"
            )
        if _is_expanded(p):
            raise ValueError(
                f"{name!r} is expanded: make it nn.Parameter(p.detach().clone().contiguous())"
            )
        if p.is_inference():
            raise ValueError(
                f"{name!r} was made in torch.inference_mode(), so that it can neither be trained "
                f"nor overwritten: make or load the model outside of it"
            )
        if not p.is_leaf:
            raise ValueError(
                f"{name!r} was computed from another tensor (is no leaf of autograd), so that its "
                f"gradient goes there: make it nn.Parameter(p.detach().clone()). A module of "
                f"TorchScript gets such by copy.deepcopy: copy it by torch.jit.save and load"
            )
        if p.device != home.device:
            raise ValueError(
                f"{name!r} is on {p.device}, {first!r} on {home.device}: a model must be on one "
                f"device"
            )
