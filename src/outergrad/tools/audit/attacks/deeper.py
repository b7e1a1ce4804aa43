"""Membership by the spans of layers inside a model, into which a candidate is passed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outergrad.tools.audit.attacks.span import NEAR, Span, span_of


def telling_spans(
    model: nn.Module, gradients: Mapping[str, Tensor], rounding: float = 1e-6
) -> dict[str, Span]:
    """Returns the spans of the linear layers of which a gradient tells something, by layer."""
    found: dict[str, Span] = {}
    for name, module in model.named_modules():
        gradient = gradients.get(f"{name}.weight")
        if type(module) is nn.Linear and gradient is not None and min(gradient.shape) > 1:
            span = span_of(gradient, rounding=rounding)
            # A gradient of full rank is that of more rows than it can hold.
            if span.is_telling and len(span.basis_RI) < min(gradient.shape) - 1:
                found[name] = span
    return found


@torch.no_grad()
def nearest_positions(model: nn.Module, spans: Mapping[str, Span], x: Tensor) -> dict[str, Tensor]:
    """Returns how near each candidate's vectors come to the span of each layer, (candidates,).

    Of the vectors of a candidate, one per position, it is the nearest: a layer behind which one
    position is read, as that of a class token, has the rows of this position alone.

    Args:
        model: In evaluation mode, with the weights of the step.
        spans: By layer.
        x: Candidates, with the rows first.
    """
    found: dict[str, Tensor] = {}
    handles = []
    for name in spans:

        def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            rows_NI = args[0].detach().flatten(0, -2)
            if len(rows_NI) % len(x) == 0:
                away_N = spans[name].distances(rows_NI)
                found[name] = away_N.view(len(x), -1).amin(dim=1)

        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def inner_members(
    model: nn.Module, gradients: Mapping[str, Tensor], x: Tensor, rounding: float = 1e-6
) -> tuple[str, Tensor] | None:
    """Returns a layer, and which candidates passed vectors into it in this step.

    What enters a linear layer inside the model is a function of the sample, which whoever has the
    weights can compute. If fewer rows than the layer is wide had a delta there, a member's vector
    is in the span of its gradient. Layers that would name rows of made-up noise, too, are left
    out: of the others that one is chosen which names most.

    Choose it where the first layer is a convolution, whose span is everything. It needs a model
    whose rows do not meet in a norm over the batch. Source: Petrov et al., arXiv 2405.15586, whose
    test it is, for a known sample.

    Args:
        model: In evaluation mode, with the weights of the step.
        gradients: By parameter, as an observer has them.
        x: Candidates, with the rows first.
        rounding: Singular values below this share of the largest are rounding.

    Returns:
        Layer, and bool of each candidate; None if no layer tells anything.
    """
    spans = telling_spans(model, gradients, rounding)
    drawn = torch.Generator().manual_seed(0)
    noise = torch.randn(x[:8].shape, generator=drawn) * x.std() + x.mean()
    foreign = nearest_positions(model, spans, noise)
    fit = {name: spans[name] for name, away in foreign.items() if bool((away >= NEAR).all())}
    near = {name: away < NEAR for name, away in nearest_positions(model, fit, x).items()}
    return max(near.items(), key=lambda pair: int(pair[1].sum()), default=None)
