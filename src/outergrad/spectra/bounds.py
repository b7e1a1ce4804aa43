"""Upper bounds of the rank of each weight's gradient, from one forward of a model."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.untappable import may_be_tapped
from outergrad.core.protocols import Rules
from outergrad.core.types import Slot
from outergrad.layers import RULES, rule_for

_SAME_ORDER = {
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Nodes of operations that leave all elements in their order."""


class Limit(Enum):
    """Cause of a bound."""

    ROWS = "rows"
    """Samples times positions, of all uses of the weight."""
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    BOTTLENECK = "bottleneck"
    """Another layer of few units, with nothing but linear layers between it and this one."""


@dataclass(frozen=True, kw_only=True)
class RankBound:
    """Upper bound of the rank of one weight's gradient, as a matrix `gradient.flatten(1)`.

    Attributes:
        weight: full name of the weight.
        bound: the rank can be no larger.
        limit: what bounds it.
        rows: samples times positions over all uses, for an embedding ids; None where the weight is
            used where no rule counts its rows.
    """

    weight: str
    bound: int
    limit: Limit
    rows: int | None


def rank_bounds(
    model: nn.Module, *args: Any, rules: Rules | None = None, **kwargs: Any
) -> tuple[RankBound, ...]:
    """Returns the largest rank that the gradient of each trained matrix can have for a batch.

    A gradient is a sum of `Dᵀ A` over the uses of a weight, so its rank is at most `min(rank A,
    rank D)` for each, and these are at most the rows N (samples times positions), the inputs I and
    the outputs O. Recurrent weights have a row per sample and time, convolutions one per sample and
    output position. Between linear layers that follow each other without a nonlinearity, ranks pass
    on: A is at most as wide as the narrowest layer before it, and one more per bias, D as the
    narrowest one behind it. Source: "Low-Rank Learning by Design", arXiv 2402.06751.

    Choose it to see what rank to send at most (`og.RankDAD(rank=...)`), or whether a batch or a
    bottleneck makes gradients of low rank; `numerical_rank` of a gradient tells how far it is used.
    Bounds are those of one batch at one site: the mean of S sites has up to S times the rows.
    Rows that are zeros count, as those of a recurrent layer's first state. The loss is taken to
    depend on what the forward returns alone: what a model keeps aside for a penalty on inner
    activations passes by a bottleneck.

    The model is copied, and the copy called once, without backward; what a wrong kind of batch
    raises there is raised here.

    Args:
        model: the model, distributed or not.
        *args: arguments of its forward, for a batch.
        rules: as in `distribute`; by default `og.RULES`.
        **kwargs: likewise, by name.

    Raises:
        ValueError: the forward returns no tensor that depends on the weights.
    """
    own = copy.deepcopy(model)
    devices = {p.device for p in own.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.enable_grad():
        watch = _Watch(own, RULES if rules is None else rules)
        output = own(*args, **kwargs)
    graph = _Graph(output)
    if not graph.nodes:
        raise ValueError("rank_bounds: the model's forward returns no tensor with a gradient")
    of_uses = _ranks(watch.uses, graph)
    found = []
    for name, p in own.named_parameters():
        if p.requires_grad and p.dim() > 1 and p.numel():
            known = None if id(p) in graph.leaves else of_uses[watch.first_name(name)]
            found.append(_bound(name, p, known))
    return tuple(found)


@dataclass(frozen=True)
class _Use:
    """One product in the forward: `y = a Wᵀ`, maybe with a bias.

    Attributes:
        slot: the product, under the first name of its weight.
        rows: N.
        source: node of the graph from which a comes; None without a graph.
        node: node of y.
        is_plain: whether a is (N, I) and y is (N, O), and nothing else enters y.
    """

    slot: Slot
    rows: int
    source: Any
    node: Any
    shapes: tuple[torch.Size, torch.Size]
    is_plain: bool


@dataclass(frozen=True)
class _Rank:
    """Rank of one use's product: its bound, and that of rows and widths alone."""

    rows: int
    bound: int
    plain: int


class _Mark(torch.autograd.Function):
    """The identity, with a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("bounds need no backward")


class _Watch:
    """The products of a model's layers, in the order of a forward.

    Args:
        model: the model, whose layers compute with detached weights from now on: what leads to a
            weight in the graph is no use that a rule counts.
        rules: rules by type of layer.

    Attributes:
        uses: the products.
    """

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self.uses: list[_Use] = []
        self._anchor = torch.zeros((), requires_grad=True)
        self._first = {id(p): name for name, p in model.named_parameters()}
        self._names = dict(model.named_parameters(remove_duplicate=False))
        owned: set[int] = set()
        for prefix, module in list(model.named_modules()):
            rule, _ = rule_for(module, rules)
            if rule is not None and id(module) not in owned:
                owned |= {id(getattr(module, child)) for child in rule.owns}
                self._watch(module, rule, rule.slots(module, prefix))

    def first_name(self, name: str) -> str:
        """Returns the name of a parameter that its gradient has; tied ones have one."""
        return self._first[id(self._names[name])]

    def _watch(self, module: nn.Module, rule: Any, slots: Sequence[Slot]) -> None:
        slots = [slot._replace(weight=self.first_name(slot.weight)) for slot in slots]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not may_be_tapped(args, kwargs):
                return swap.plain_forward(*args, **kwargs)
            return rule.forward(module, partial(self._tap, slots), *args, **kwargs)

        swap = ClassSwap(module, forward)

    def _tap(
        self,
        slots: Sequence[Slot],
        y: Tensor,
        a: Tensor,
        slot: int = 0,
        rows: int | None = None,
        **_: Any,
    ) -> Tensor:
        here = slots[slot % len(slots)]
        rows = y.numel() // max(here.groups * here.outputs, 1) if rows is None else rows
        plain = (
            a.shape == (rows, here.inputs)
            and y.shape == (rows, here.outputs)
            and not (here.lookup or here.patches or here.recomputed or here.vector)
        )
        source = a.grad_fn
        y = _Mark.apply(y, self._anchor)  # type: ignore[assignment]
        self.uses.append(_Use(here, rows, source, y.grad_fn, (a.shape, y.shape), plain))
        return y


class _Graph:
    """The graph behind what a forward has returned.

    Attributes:
        nodes: all nodes.
        times: for each node, how often something reads its output.
        leaves: ids of the leaves, as parameters, that it leads to.
    """

    def __init__(self, output: Any) -> None:
        self.times: Counter[Any] = Counter()
        self.nodes: set[Any] = set()
        self.leaves: set[int] = set()
        left = [t.grad_fn for t in _tensors(output) if t.grad_fn is not None]
        self.times.update(left)
        while left:
            node = left.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.leaves.add(id(leaf))
            following = [after for after, _ in node.next_functions if after is not None]
            self.times.update(following)
            left += following

    def product_before(self, use: _Use, products: Mapping[Any, _Use]) -> tuple[_Use | None, bool]:
        """Returns the product whose output is the input of another, and whether of that alone."""
        node, alone = use.source, True
        while node is not None and node not in products:
            if type(node).__name__ not in _SAME_ORDER:
                return None, False
            alone = alone and self.times[node] == 1
            node = next((after for after, _ in node.next_functions), None)
        if node is None:
            return None, False
        before = products[node]
        same = use.is_plain and before.is_plain and before.shapes[1] == use.shapes[0]
        return (before, alone and self.times[node] == 1) if same else (None, False)


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | nn.Module):
            yield from _tensors(vars(leaf))


def _ranks(uses: Sequence[_Use], graph: _Graph) -> dict[str, dict[Slot, list[_Rank]]]:
    """Returns the bounds of all uses, by weight and product."""
    products = {use.node: use for use in uses if use.node is not None}
    before = [graph.product_before(use, products) for use in uses]
    activations: dict[int, int] = {}
    for use, (source, _) in zip(uses, before, strict=True):
        most = min(use.rows, use.slot.inputs)
        if source is not None:
            of_source = min(activations[id(source)], source.slot.outputs, source.slot.inputs)
            most = min(most, of_source + (source.slot.bias is not None))
        activations[id(use)] = most
    deltas = {id(use): min(use.rows, use.slot.outputs) for use in uses}
    for use, (source, alone) in reversed(list(zip(uses, before, strict=True))):
        if source is not None and alone:
            deltas[id(source)] = min(deltas[id(source)], deltas[id(use)], use.slot.inputs)
    found: dict[str, dict[Slot, list[_Rank]]] = defaultdict(lambda: defaultdict(list))
    for use in uses:
        plain = min(use.rows, use.slot.inputs, use.slot.outputs)
        bound = min(activations[id(use)], deltas[id(use)])
        of_slot = found[use.slot.weight][use.slot]
        of_slot.append(_Rank(use.rows, bound * use.slot.groups, plain * use.slot.groups))
    return found


def _bound(name: str, weight: Tensor, of_slots: Mapping[Slot, Sequence[_Rank]] | None) -> RankBound:
    outputs, inputs = weight.shape[0], weight.numel() // weight.shape[0]
    width, limit = (inputs, Limit.INPUTS) if inputs < outputs else (outputs, Limit.OUTPUTS)
    if of_slots is None:
        return RankBound(weight=name, bound=width, limit=limit, rows=None)
    ranks = [rank for of_slot in of_slots.values() for rank in of_slot]
    total, plain = sum(rank.bound for rank in ranks), sum(rank.plain for rank in ranks)
    if total < width:
        limit = Limit.BOTTLENECK if total < plain else Limit.ROWS
    rows = sum(rank.rows for rank in ranks)
    return RankBound(weight=name, bound=min(total, width), limit=limit, rows=rows)
