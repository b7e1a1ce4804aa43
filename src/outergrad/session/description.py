"""What sites must have in common, in words that they compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outergrad._version import __version__
from outergrad.session.inspect import Inspection


def describe(model: nn.Module, method: object, inspection: Inspection) -> list[str]:
    """What the sites must have in common, a line each."""
    lines = [
        f"outergrad {__version__}",
        f"torch {torch.__version__}",
        f"method: {method!r}",
    ]
    for kind, name, t in shared_tensors(model, inspection):
        trained = ", trained" if t.requires_grad else ""
        lines.append(f"{kind} {name}: {tuple(t.shape)} {t.dtype}{trained}")
    lines += [f"block {found.names}" for found in inspection.blocks]
    return lines + [str(slot) for slot in inspection.model.slots]


def shared_tensors(model: nn.Module, inspection: Inspection) -> list[tuple[str, str, Tensor]]:
    """Parameters and buffers that are no site's own: what each is, its name, itself."""
    parameters = (
        ("parameter", n, p) for n, p in model.named_parameters() if n not in inspection.local
    )
    buffers = model.named_buffers()
    own = inspection.local_buffers
    return [*parameters, *(("buffer", n, t) for n, t in buffers if n not in own)]
