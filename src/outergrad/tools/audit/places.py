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
    """

    data: str | None
    is_rectified: bool
    labels: str | None
    tokens: str | None


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
    return Places(
        data=data,
        is_rectified=data is not None and _is_before_relu(model, order, left, entered, data),
        labels=labels[-1] if labels else None,
        tokens=tokens,
    )


def _is_data(entered: Tensor, x: Tensor) -> bool:
    same = entered.ndim == 2 and len(entered) == len(x) and entered.numel() == x.numel()
    return same and bool((entered == x.flatten(1)).all())


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
