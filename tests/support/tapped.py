"""Layers computed by their rules, in one process and beside the layers themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import outergrad as og
from outergrad.core.protocols import Rule
from outergrad.core.transform import Samples
from outergrad.core.types import Call

Gradients = dict[str, Tensor]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class _Tap(torch.autograd.Function):
    """What a tap does for a session: gives the product's delta away, and its factors' input."""

    @staticmethod
    def forward(ctx, y, a, receive, *params):
        ctx.save_for_backward(a)
        ctx.receive = receive
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, delta):
        ctx.receive(Call(ctx.saved_tensors[0], delta))
        return delta, *(None for _ in ctx.needs_input_grad[1:])


class Tapped:
    """A module computed by its rule.

    Attributes:
        gradients: of its parameters by name, from the factors of every slot.
        rows: how many factors had, by slot.
        told: how many rows `forward` told the taps of, by slot.
        uses: of every tap its slot, what it gave, and what it said of samples.
    """

    def __init__(self, module: nn.Module, rule: Rule | None = None) -> None:
        self.module, self.rule = module, rule or og.RULES[type(module)]
        self.slots = self.rule.slots(module, "")
        self.gradients = zeros(module)
        self.rows, self.told = [0] * len(self.slots), [0] * len(self.slots)
        self.uses: list[tuple[int, Call, Samples]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule.forward(self.module, self._tap, *args, **kwargs)

    def _tap(
        self,
        y: Tensor,
        a: Tensor,
        slot: int = 0,
        rows: int | None = None,
        *,
        samples: int | None = None,
        positions_first: bool = False,
    ) -> Tensor:
        index, here = slot % len(self.slots), self.slots[slot]
        usual = y.numel() // (here.groups * here.outputs)
        self.told[index] += usual if rows is None else rows
        about = Samples(samples or 0, positions_first, 0)
        params = [self.module.get_parameter(name) for name in here.params]
        return _Tap.apply(y, a, lambda call: self._receive(index, call, about), *params)

    def _receive(self, slot: int, call: Call, about: Samples) -> None:
        factors = self.rule.factors(self.module, slot, call)
        self.uses.append((slot, call, about))
        self.rows[slot] += factors.d_GRO.shape[1]
        add(self.gradients, self.slots[slot], factors)

    def total(self) -> Gradients:
        """With what autograd has left in parameters that are used without a tap."""
        own = autograds(self.module)
        return {name: gradient + own[name] for name, gradient in self.gradients.items()}


def add(into: Gradients, slot: og.Slot, factors: og.Factors) -> None:
    """Adds the product of rows to the gradients of a slot's parameters."""
    d_GRO, a_GRI, b_GO = factors
    weight = into[slot.weight][slice(*(slot.weight_rows or (None,)))]
    if slot.lookup:
        weight.index_add_(0, a_GRI, d_GRO[0])
    else:
        weight += (d_GRO.mT @ a_GRI).view(weight.shape)
    if slot.bias is not None:
        sums_GO = d_GRO.sum(1) if b_GO is None else b_GO
        into[slot.bias][slice(*(slot.bias_rows or (None,)))] += sums_GO.flatten()


def zeros(module: nn.Module) -> Gradients:
    return {name: torch.zeros_like(p) for name, p in module.named_parameters()}


def autograds(module: nn.Module) -> Gradients:
    """What autograd has left in the parameters."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {**zeros(module), **found}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of an output, however they are nested."""
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def weighted(outputs: Sequence[Tensor]) -> Tensor:
    """A loss with another weight for every element."""
    weights = [torch.linspace(-1, 2, t.numel()).to(t.dtype).view(t.shape) for t in outputs]
    return sum((t * w + t.square()).sum() for t, w in zip(outputs, weights, strict=True))


def outcome(
    call: Callable[..., Any], args: Any, loss: Callable[[Sequence[Tensor]], Tensor] = weighted
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a call, and the gradients of their loss by what floats among its arguments."""
    leaves = {id(t): t.detach() for t in tensors_of(args)}
    inputs = [t.requires_grad_() for t in leaves.values() if t.is_floating_point()]
    outputs = tensors_of(call(*tree_map(lambda t: leaves.get(id(t), t), args)))
    loss(outputs).backward()
    return outputs, [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]


def changed_in_place(call: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """The same call, whose first output is then changed where it lies."""

    def forward(*args: Any) -> list[Tensor]:
        first, *others = tensors_of(call(*args))
        return [first.mul_(3), *others]

    return forward


def compare(
    module: nn.Module,
    args: Any,
    rule: Rule | None = None,
    *,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call,
    loss: Callable[[Sequence[Tensor]], Tensor] = weighted,
) -> tuple[Tapped, nn.Module]:
    """That a module and its rule agree on outputs, how these lie in memory, and all gradients.

    Args:
        module: is copied.
        args: what it is called with.
        rule: of the module, if it is none of the library's.
        around: makes of either's call the one that is compared.
        loss: of the outputs.

    Returns:
        Both, with the gradients.
    """
    tapped, plain = Tapped(copy.deepcopy(module), rule), copy.deepcopy(module)
    torch.manual_seed(3)
    expected = outcome(around(plain), args, loss)
    torch.manual_seed(3)
    found = outcome(around(tapped), args, loss)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(tapped.total(), autograds(plain), **CLOSE)
    assert [t.stride() for t in found[0]] == [t.stride() for t in expected[0]]
    return tapped, plain
