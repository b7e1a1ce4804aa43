"""Batches of small gradients that are compressed together, by one warm iteration."""

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
"""Elements from which copying a gradient into a batch takes longer than the batch saves."""

_PADDING = 1 << 14
"""Zeros of padding up to which a larger batch costs less than one more batch."""


class Warm(NamedTuple):
    """A part that can be compressed from the directions of the last step.

    Attributes:
        part: Part that is to be sent.
        residual: Unsent part of earlier steps, if any.
        whole: True if the whole unsent part is kept as a matrix; then the part's gradient is
            formed, and `residual` is a matrix.
        x_GIK: Leading directions of the last step, completed by fixed random ones.
        columns: Number of directions to iterate on.
    """

    part: Part
    residual: Gradient | None
    whole: bool
    x_GIK: Tensor
    columns: int

    @property
    def form(self) -> Form:
        """Key that decides which parts share a batch."""
        gradient = self.part.gradient
        tensors = (gradient,) if isinstance(gradient, Tensor) else gradient[:2]
        shapes, dtypes = zip(*[(t.shape, t.dtype) for t in tensors], strict=True)
        return Form(self.part.rows, self.residual is not None, self.whole, dtypes, shapes)


@dataclass(frozen=True)
class Found:
    """Triplets of one or several slots, equally many for each.

    Attributes:
        parts: Parts of these slots.
        triplets: Triplets, with the groups of all slots behind each other, padded to one shape.
        whole_GOI: Matrices that were decomposed, if the whole unsent part is kept.
    """

    parts: Sequence[Part]
    triplets: LowRank
    whole_GOI: Tensor | None = None

    @property
    def slots(self) -> list[Slot]:
        """Slots of the parts."""
        return [part.slot for part in self.parts]

    @property
    def rows(self) -> int:
        """Number of triplets that are sent of each slot."""
        return self.parts[0].rows

    @property
    def leading(self) -> LowRank:
        """Triplets that are sent."""
        return self.triplets.leading(self.rows)

    def sent(self) -> dict[Slot, Factors]:
        """Returns the triplets that are sent, as factors by slot."""
        slots = self.slots
        return dict(zip(slots, apart(self.leading.factors(self.rows), slots), strict=True))


class Form(NamedTuple):
    """Key of a batch: parts whose keys differ in the shapes alone share one."""

    rows: int
    has_residual: bool
    whole: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all tensors."""
        return sum(shape.numel() for shape in self.shapes)

    def behind(self, other: Form) -> Form | None:
        """Returns the key of a padded batch, this one behind `other`; None if they differ."""
        if self[:4] != other[:4]:
            return None
        pairs = zip(other.shapes, self.shapes, strict=True)
        shapes = tuple(torch.Size((a[0] + b[0], *map(max, a[1:], b[1:]))) for a, b in pairs)
        return self._replace(shapes=shapes)


@lru_cache(maxsize=256)
def bundles(forms: tuple[Form, ...]) -> list[list[int]]:
    """Returns the indices of each batch; a large gradient has a batch of its own."""
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
    """Returns the triplets of gradients plus residuals, and these sums where they are kept whole.

    One iteration serves all members. Their groups are behind each other, padded to one shape. The
    members' residuals must be of one kind, factors or matrices.
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
    """Subtracts what is sent from a matrix, in place."""
    return whole_GOI.baddbmm_(sent.d_GRO.mT, sent.a_GRI, alpha=-1)


def _contiguous(factors: Gradient) -> Factors:
    """Copies to the layout of loaded factors, so that products round alike after a checkpoint."""
    assert isinstance(factors, Factors)
    return Factors(factors.d_GRO.contiguous(), factors.a_GRI.contiguous())
