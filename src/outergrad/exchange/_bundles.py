"""Gradients that one iteration is enough for: several small ones as one batch of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad._types import Factors, Gradient, Part
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import formed, padded, together
from outergrad.linalg.product import cheapest, unscaled
from outergrad.linalg.subspace import warm_iteration
from outergrad.linalg.total import total

_LARGE = 1 << 17
"""Elements of a gradient that takes longer to copy than it saves to compute it with others."""

_PADDING = 1 << 14
"""Zeros in a batch that cost less to compute with than another batch costs to start."""


class Warm(NamedTuple):
    """What can be compressed from where the last step ended.

    Attributes:
        part: what is to be sent.
        unsent: what was not sent before, if anything.
        whole: whether all of what is not sent now is kept, as a matrix; then `gradient` is
            formed, and `unsent` a matrix.
        x_GIK: directions that were leading.
        columns: how many to iterate on.
    """

    part: Part
    unsent: Gradient | None
    whole: bool
    x_GIK: Tensor
    columns: int

    @property
    def kind(self) -> Kind:
        """What decides who is computed together."""
        gradient = self.part.gradient
        tensors = (gradient,) if isinstance(gradient, Tensor) else gradient[:2]
        shapes, dtypes = zip(*((t.shape, t.dtype) for t in tensors), strict=True)
        return Kind(self.part.rows, self.unsent is not None, self.whole, dtypes, shapes)


class Kind(NamedTuple):
    """The same but for the shapes goes together."""

    rows: int
    has_unsent: bool
    whole: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]


@lru_cache(maxsize=256)
def bundles(kinds: tuple[Kind, ...]) -> list[list[int]]:
    """Who is computed together, by their places; large ones alone."""
    found: list[list[int]] = []
    for i in sorted(range(len(kinds)), key=lambda i: -_numel([kinds[i]])):
        home = next((b for b in found if _go_together([kinds[j] for j in (*b, i)])), None)
        if home is None:
            found.append([i])
        else:
            home.append(i)
    return found


def _go_together(kinds: Sequence[Kind]) -> bool:
    first = kinds[0]
    alike = all(kind[:4] == first[:4] for kind in kinds)
    if not alike or max(_numel([kind]) for kind in kinds) > _LARGE:
        return False
    groups = sum(kind.shapes[0][0] for kind in kinds)
    tensors = zip(*(kind.shapes for kind in kinds), strict=True)
    whole = sum(
        groups * max(s[1] for s in shapes) * max(s[2] for s in shapes) for shapes in tensors
    )
    return whole - _numel(kinds) <= _PADDING


def _numel(kinds: Sequence[Kind]) -> int:
    return sum(shape.numel() for kind in kinds for shape in kind.shapes)


def compress_together(members: Sequence[Warm]) -> tuple[LowRank, Tensor | None]:
    """All triplets of their sums, by one iteration, and if it is kept what they do not hold.

    Groups stand behind each other, padded to one shape. What the members have not sent is taken
    to be in the same form.
    """
    first = members[0]
    columns = max(warm.columns for warm in members)
    x_GIK = padded([warm.x_GIK[..., :columns] for warm in members], width=columns).contiguous()
    gradient = together([warm.part.gradient for warm in members])
    unsent = [warm.unsent for warm in members if warm.unsent is not None]
    if first.whole:
        return _whole(gradient, together(unsent) if unsent else None, x_GIK, first.part.rows)
    main = cheapest(unscaled(gradient), columns, 1, with_energy=False)
    others = (unscaled(_contiguous(together(unsent))),) if unsent else ()
    return warm_iteration(total(main, *others), x_GIK.to(main.dtype)), None


def _whole(
    gradient: Gradient, unsent: Gradient | None, x_GIK: Tensor, rows: int
) -> tuple[LowRank, Tensor]:
    whole_GOI = formed(gradient, unsent)
    found = warm_iteration(unscaled(whole_GOI), x_GIK.to(whole_GOI.dtype))
    return found, without(whole_GOI, found.leading(rows))


def without(whole_GOI: Tensor, sent: LowRank) -> Tensor:
    """What is left of a matrix, in its place."""
    return whole_GOI.baddbmm_(sent.d_GRO.mT, sent.a_GRI, alpha=-1)


def _contiguous(factors: Gradient) -> Factors:
    """The same layout whether it was saved and loaded or not: so that products round alike."""
    assert isinstance(factors, Factors)
    return Factors(factors.d_GRO.contiguous(), factors.a_GRI.contiguous())
