"""Description of a model and its method, as lines of text that the sites compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outergrad._version import __version__
from outergrad.messages.raw import ORDINARY, digest, has_elements, parts_of
from outergrad.session.inspect import Inspection


def describe(model: nn.Module, method: object, inspection: Inspection) -> list[str]:
    """Returns lines that must be equal on all sites: versions, method, tensors, blocks, slots."""
    lines = [
        f"outergrad {__version__}",
        f"torch {torch.__version__}",
        f"method: {method!r}",
    ]
    for kind, name, t in _all(model, inspection):
        trained = ", trained" if t.requires_grad else ""
        shape = tuple(t.shape) if has_elements(t) else _content(t)
        lines.append(f"{kind} {name}: {shape} {t.dtype}{trained}")
    lines += [f"block {found.names}" for found in inspection.blocks]
    return lines + [str(slot) for slot in inspection.model.slots]


def shared_tensors(model: nn.Module, inspection: Inspection) -> list[tuple[str, str, Tensor]]:
    """Returns the parameters and buffers that are made equal, as (kind, name, tensor).

    Tensors without elements of their own (sparse, quantized, …) are only compared, by `describe`.
    """
    return [found for found in _all(model, inspection) if has_elements(found[2])]


def _all(model: nn.Module, inspection: Inspection) -> list[tuple[str, str, Tensor]]:
    parameters = (
        ("parameter", n, p) for n, p in model.named_parameters() if n not in inspection.local
    )
    buffers = model.named_buffers()
    own = inspection.local_buffers
    return [*parameters, *(("buffer", n, t) for n, t in buffers if n not in own)]


def _content(t: Tensor) -> str:
    """Describes a tensor that cannot be made equal, by a digest of its content if it has one."""
    kind = type(t).__name__ if type(t) not in ORDINARY else str(t.layout).removeprefix("torch.")
    if type(t) in ORDINARY and t.layout == torch.strided:
        kind = "quantized" if t.is_quantized else "nested"
    elif t.is_nested:
        kind = "jagged"
    try:
        number = digest(b"", parts_of(t))
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):
        return f"{kind}, which is not compared"
    return f"{kind} with content {number}, which must be the same on all sites"
