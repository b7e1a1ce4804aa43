"""The rows of one slot in a message: as factors, and as they are written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outergrad.core.coding import Field, decode, encode
from outergrad.core.types import Factors


class Rows:
    """Views of a message.

    Args:
        fields: the deltas, the activations or ids, and the bias gradient if it has one.
        written: the tensors that each of them is written as.
    """

    def __init__(self, fields: Sequence[Field], written: Sequence[Sequence[Tensor]]) -> None:
        self._fields, self._written = fields, written

    def fill(self, factors: Factors) -> None:
        """Writes factors into zeros; fewer rows than agreed leave some."""
        rows = factors.d_GRO.shape[1]
        for field, views, t in zip(self._fields, self._written, factors, strict=False):
            if t is not None:
                for view, part in zip(views, encode(field.codecs, t), strict=True):
                    _first(view, rows).copy_(part)

    def read(self) -> Factors:
        """What was written: views where it was not encoded."""
        pairs = zip(self._fields, self._written, strict=True)
        return Factors(*(decode(f.codecs, views, f.shape, f.dtype) for f, views in pairs))


def _first(view: Tensor, rows: int) -> Tensor:
    """The first rows of deltas, activations, (G, R, W), or ids, (R,); all of a bias gradient."""
    if view.dim() == 2:
        return view
    return view[:rows] if view.dim() == 1 else view[:, :rows]
