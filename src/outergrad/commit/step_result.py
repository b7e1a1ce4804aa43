"""Step results as bytes, for sites that lack a message of a step and lost its sender.

The bytes come from another site's board. They are read within bounds, and may be anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outergrad.messages.raw import as_tensor, digest, from_raw, raw

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        applied: whether the step counts.
        means: by parameter, the mean gradient that replaces `param.grad`.
        additions: by parameter, the mean gradient that is added to `param.grad`.
        buffers: by name, the agreed values of buffers.
    """

    applied: bool
    means: Mapping[str, Tensor] = field(default_factory=dict)
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Returns the bytes for a board: length of the header, JSON header, raw tensors."""
        parts = [dict(self.means), dict(self.additions), dict(self.buffers)]
        told = [[[n, str(t.dtype), list(t.shape)] for n, t in p.items()] for p in parts]
        tensors = [raw(t).cpu() for part in parts for t in part.values()]
        text = json.dumps({"applied": self.applied, "parts": told, "digest": digest(b"", tensors)})
        head = text.encode()
        body = torch.cat(tensors).numpy().tobytes() if tensors else b""
        return len(head).to_bytes(_LENGTH_BYTES, "little") + head + body

    @staticmethod
    def of(content: bytes) -> StepResult | None:
        """Parses the bytes that another site has put on the board; None if they cannot be read."""
        try:
            start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
            told = json.loads(content[_LENGTH_BYTES:start])
            return _read(told, as_tensor(content[start:]) if content[start:] else None)
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, RecursionError):
            return None


def _read(told: dict, body: Tensor | None) -> StepResult:
    shapes = [
        [(str(name), _dtype(code), torch.Size(shape)) for name, code, shape in part]
        for part in told["parts"]
    ]
    flat = [one for part in shapes for one in part]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in flat]
    body = torch.empty(0, dtype=torch.uint8) if body is None else body
    found = list(body.split(sizes)) if sizes else []
    if digest(b"", found) != told["digest"]:
        raise ValueError("not as it was put there")
    views = iter(found)
    parts = [{n: from_raw(next(views), dtype, shape) for n, dtype, shape in p} for p in shapes]
    return StepResult(told["applied"] is True, *parts)


def _dtype(told: str) -> torch.dtype:
    found = getattr(torch, told.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{told!r} is no dtype")
    return found
