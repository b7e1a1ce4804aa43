"""Layers of a model that attacks look at, found by running it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Places:
    """Names of layers.

    Attributes:
        data: Linear layer that the rows of data enter as they are; None without one.
        is_rectified: True if the outputs of that layer go through a ReLU.
        labels: Linear layer whose outputs are the model's, with a bias; None without one.
        tokens: Embedding that the ids of data enter; None without one.
        patches: Convolution that images enter as they are; None without one.
        positions: Parameter that is added to the outputs of that convolution, and its row that
            goes to the first patch; None without one.
    """

    data: str | None
    is_rectified: bool
    labels: str | None
    tokens: str | None
    patches: str | None = None
    positions: tuple[str, int] | None = None


@torch.no_grad()
def places_of(model: nn.Module, x: Tensor) -> Places:
    """Finds the layers by a forward pass of some rows; the model is in training mode."""
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}
    order: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        name = names[module]
        order.append(name)
        if args and isinstance(args[0], Tensor):
            entered[name] = args[0].clone()
        if isinstance(out, Tensor):
            left[name] = out.clone()

    leaves = [module for module in names if not list(module.children())]
    handles = [module.register_forward_hook(note) for module in leaves]
    try:
        output = model(x)
    finally:
        for handle in handles:
            handle.remove()
    linear = [name for name in order if type(model.get_submodule(name)) is nn.Linear]
    data = next((n for n in linear if _is_data(entered[n], x)), None)
    labels = [n for n in linear if model.get_submodule(n).bias is not None]
    labels = [
        n for n in labels if left[n].shape == output.shape and bool((left[n] == output).all())
    ]
    embeddings = [n for n in order if type(model.get_submodule(n)) is nn.Embedding]
    tokens = next((n for n in embeddings if torch.equal(entered[n], x)), None)
    convolutions = [n for n in order if type(model.get_submodule(n)) is nn.Conv2d]
    patches = next((n for n in convolutions if _is_same(entered[n], x)), None)
    return Places(
        data=data,
        is_rectified=data is not None and _is_before_relu(model, order, left, entered, data),
        labels=labels[-1] if labels else None,
        tokens=tokens,
        patches=patches,
        positions=None if patches is None else _positions(model, patches, x),
    )


def _is_data(entered: Tensor, x: Tensor) -> bool:
    same = entered.ndim == 2 and len(entered) == len(x) and entered.numel() == x.numel()
    return same and bool((entered == x.flatten(1)).all())


def _is_same(entered: Tensor, x: Tensor) -> bool:
    return entered.shape == x.shape and bool((entered == x).all())


@torch.enable_grad()
def _positions(model: nn.Module, patches: str, x: Tensor) -> tuple[str, int] | None:
    """Finds the parameter whose gradient is that of a convolution's outputs, summed over rows."""
    made: list[Tensor] = []
    layer = model.get_submodule(patches)
    handle = layer.register_forward_hook(lambda *told: made.append(told[-1]))
    try:
        output = model(x)
    finally:
        handle.remove()
    params = {n: p for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1}
    drawn = torch.Generator().manual_seed(0)
    loss = (output * torch.randn(output.shape, generator=drawn)).sum()
    delta, *found = torch.autograd.grad(loss, [made[0], *params.values()], allow_unused=True)
    summed_PO = delta.sum(dim=0).flatten(1).T
    for name, gradient in zip(params, found, strict=True):
        if gradient is None or gradient.shape[-1] != summed_PO.shape[1]:
            continue
        rows_PO = gradient.flatten(0, -2)
        for start in range(len(rows_PO) - len(summed_PO) + 1):
            if torch.allclose(rows_PO[start : start + len(summed_PO)], summed_PO):
                return name, start
    return None


def _is_before_relu(
    model: nn.Module,
    order: list[str],
    left: dict[str, Tensor],
    entered: dict[str, Tensor],
    name: str,
) -> bool:
    behind = order[order.index(name) + 1 :][:1]
    return any(
        type(model.get_submodule(n)) is nn.ReLU and torch.equal(entered[n], left[name])
        for n in behind
    )
