"""Gradients that one iteration is enough for: several small ones as one batch of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient, Part, Slot
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import apart, formed, padded, together
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
        residual: what was not sent before, if anything.
        whole: whether all of what is not sent now is kept, as a matrix; then `gradient` is
            formed, and `residual` a matrix.
        x_GIK: directions that were leading, with fixed random ones where these were fewer.
        columns: how many to iterate on.
    """

    part: Part
    residual: Gradient | None
    whole: bool
    x_GIK: Tensor
    columns: int

    @property
    def form(self) -> Form:
        """What decides who is computed together."""
        gradient = self.part.gradient
        tensors = (gradient,) if isinstance(gradient, Tensor) else gradient[:2]
        shapes, dtypes = zip(*[(t.shape, t.dtype) for t in tensors], strict=True)
        return Form(self.part.rows, self.residual is not None, self.whole, dtypes, shapes)


@dataclass(frozen=True)
class Found:
    """The triplets of one or several slots, of all as many rows.

    Attributes:
        parts: what they are of.
        triplets: the groups of all slots behind each other, padded to one shape.
        whole_GOI: what they were found of, if all that is not sent is kept.
    """

    parts: Sequence[Part]
    triplets: LowRank
    whole_GOI: Tensor | None = None

    @property
    def slots(self) -> list[Slot]:
        """Of the parts."""
        return [part.slot for part in self.parts]

    @property
    def rows(self) -> int:
        """That are sent of each."""
        return self.parts[0].rows

    @property
    def leading(self) -> LowRank:
        """The triplets that are sent."""
        return self.triplets.leading(self.rows)

    def sent(self) -> dict[Slot, Factors]:
        """The same by slot."""
        slots = self.slots
        return dict(zip(slots, apart(self.leading.factors(self.rows), slots), strict=True))


class Form(NamedTuple):
    """The same but for the shapes goes together."""

    rows: int
    has_residual: bool
    whole: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(shape.numel() for shape in self.shapes)

    def behind(self, other: Form) -> Form | None:
        """Of the batch in which this one stands behind another, padded; None if it cannot."""
        if self[:4] != other[:4]:
            return None
        pairs = zip(other.shapes, self.shapes, strict=True)
        shapes = tuple(torch.Size((a[0] + b[0], *map(max, a[1:], b[1:]))) for a, b in pairs)
        return self._replace(shapes=shapes)


@lru_cache(maxsize=256)
def bundles(forms: tuple[Form, ...]) -> list[list[int]]:
    """Who is computed together, by their places; large ones alone."""
    found: list[tuple[list[int], Form]] = []
    for i in sorted(range(len(forms)), key=lambda i: -forms[i].numel):
        for k, (places, batch) in enumerate(found):
            joined = forms[i].behind(batch)
            numel = sum(forms[place].numel for place in (*places, i))
            large = forms[places[0]].numel > _LARGE
            if joined is not None and not large and joined.numel - numel <= _PADDING:
                found[k] = [*places, i], joined
                break
        else:
            found.append(([i], forms[i]))
    return [places for places, _ in found]


def compress_together(members: Sequence[Warm]) -> tuple[LowRank, Tensor | None]:
    """All triplets of their sums, by one iteration, and the sums, where all of them is kept.

    Groups stand behind each other, padded to one shape. What the members have not sent is taken
    to be in the same form.
    """
    first = members[0]
    columns = max(warm.columns for warm in members)
    x_GIK = padded([warm.x_GIK[..., :columns] for warm in members], width=columns).contiguous()
    gradient = together([warm.part.gradient for warm in members])
    residual = [warm.residual for warm in members if warm.residual is not None]
    if first.whole:
        whole_GOI = formed(gradient, together(residual) if residual else None)
        return warm_iteration(unscaled(whole_GOI), x_GIK.to(whole_GOI.dtype)), whole_GOI
    main = cheapest(unscaled(gradient), columns, 1, with_energy=False)
    others = (unscaled(_contiguous(together(residual))),) if residual else ()
    return warm_iteration(total(main, *others), x_GIK.to(main.dtype)), None


def without(whole_GOI: Tensor, sent: LowRank | Factors) -> Tensor:
    """What is left of a matrix, in its place."""
    return whole_GOI.baddbmm_(sent.d_GRO.mT, sent.a_GRI, alpha=-1)


def _contiguous(factors: Gradient) -> Factors:
    """The same layout whether it was saved and loaded or not: so that products round alike."""
    assert isinstance(factors, Factors)
    return Factors(factors.d_GRO.contiguous(), factors.a_GRI.contiguous())
