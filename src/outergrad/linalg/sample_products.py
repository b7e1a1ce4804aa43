"""Squared norms of gradients by sample, from rows; where these are few, no gradient is formed.

Slots add to parameters by `Addend`s. The squared norm of a sum is that of each addend,
and twice the inner product of each pair: `|g + h|² = |g|² + |h|² + 2 ⟨g, h⟩`. Where the terms
cancel, what is left has the error of the terms, `(|g| + |h|)² / |g + h|²` times that of a number.
So inner products of rows, and all of several addends, are in float64. A single addend that is
formed has this error in its length, not in the square: it is as near as what is sent of it.

Letters: B samples, N rows, G groups, L and M rows of the sample that has most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from outergrad.core.transform import Projection, SampleRows, Samples
from outergrad.core.types import RowRange, Slot, bias_slot
from outergrad.linalg.joined import row_each
from outergrad.linalg.outer import widened

_HALVED = 48
"""Rows of a sample from which on halves are quicker than the whole."""
_DEARER = 2.5
"""Time of a product of rows in float64, copies of these included, in those of a formed one."""
_PIECE = 128
"""Numbers whose squares are added up in float32."""


def sample_of_rows(samples: Samples, rows: int, device: torch.device) -> Tensor:
    """Returns the index of each row's sample, (N,), int64."""
    index_B = torch.arange(samples.total, device=device)
    positions = rows // max(samples.total, 1)
    if positions == 1:
        return index_B
    if samples.positions_first:
        return index_B.repeat(positions)
    return index_B.repeat_interleave(positions)


class Addend(ABC):
    """A gradient by sample that the rows of one slot add to one parameter.

    Args:
        param: full name of the parameter.
        rows: the part of its first dimension; of a vector, of its elements.
        width: number of elements of one of these rows.
    """

    def __init__(self, param: str, rows: RowRange, width: int) -> None:
        self.param, self.rows, self.width = param, rows, width

    def shared(self, other: Addend) -> RowRange | None:
        """Returns the elements of the parameter that both add to; None if there are none."""
        start = max(self.rows[0] * self.width, other.rows[0] * other.width)
        stop = min(self.rows[1] * self.width, other.rows[1] * other.width)
        return (start, stop) if self.param == other.param and start < stop else None

    @abstractmethod
    def formed(self) -> Tensor:
        """Returns the gradient of each sample, all elements of `rows`, (B, E)."""
        ...

    def inner(self, other: Addend) -> Tensor:
        """Returns the inner product with another addend, by sample, (B,)."""
        if other is self:
            return squares(self.formed())
        shared = self.shared(other)
        assert shared is not None
        pair = []
        for one in (self, other):
            first = one.rows[0] * one.width
            pair.append(one.formed()[:, shared[0] - first : shared[1] - first])
        return (pair[0] * pair[1]).sum(dim=1)


class Vector(Addend):
    """Sums of the rows of each sample, (B, E): of a bias, of a vector, or of a formed weight.

    They may be given as numbers, (B,), times vectors.
    """

    def __init__(
        self, param: str, rows: RowRange, sums_BE: Tensor, times_B: Tensor | None = None
    ) -> None:
        super().__init__(param, rows, sums_BE.shape[1] // (rows[1] - rows[0]))
        self._sums_BE, self._times_B = sums_BE, times_B

    def formed(self) -> Tensor:
        """Returns the sums."""
        return self._sums_BE if self._times_B is None else self._sums_BE * self._times_B[:, None]

    def inner(self, other: Addend) -> Tensor:
        """As for an addend; of itself without a copy."""
        if other is not self:
            return super().inner(other)
        squares_B = squares(self._sums_BE)
        return squares_B if self._times_B is None else squares_B * self._times_B.double().square()


def squares(t_BE: Tensor) -> Tensor:
    """Returns squared norms, (B,), in float64, of pieces that are added up in their own type.

    PyTorch's norms on a CPU add up one number after another: in float32 that of a vector of four
    million equal numbers is too small by a part in 600, and of normal ones by one in 13,000. Of a
    piece it is right to rounding, and as quick.
    """
    whole = t_BE.shape[1] // _PIECE * _PIECE
    pieces_BKP = t_BE[:, :whole].unflatten(1, (whole // _PIECE, _PIECE))
    squares_B = torch.linalg.vector_norm(pieces_BKP, dim=2).double().square().sum(dim=1)
    return squares_B + t_BE[:, whole:].double().square().sum(dim=1)


class Product(Addend):
    """Products of the rows of each sample, `d_bᵀ a_b`, in groups.

    With one row it is `|d|² |a|²`, with few the inner product is that of Gram matrices, with many
    the products are formed, in no more than twice the memory of the rows.
    """

    def __init__(self, param: str, rows: RowRange, d_BGLO: Tensor, a_BGLI: Tensor) -> None:
        super().__init__(param, rows, a_BGLI.shape[3])
        self.d_BGLO, self.a_BGLI = d_BGLO, a_BGLI

    def formed(self) -> Tensor:
        """Returns the products."""
        return (self.d_BGLO.mT @ self.a_BGLI).flatten(1)

    def inner(self, other: Addend) -> Tensor:
        """As for an addend; by Gram matrices of another product's rows, if these are few."""
        if isinstance(other, Lookup):
            return other.inner(self)
        if not isinstance(other, Product) or not self._pays(other):
            return super().inner(other)
        shared = self.shared(other)
        assert shared is not None
        if other is self:
            return _square(self.d_BGLO, self.a_BGLI)
        d_BGLO, e_BGMO = self._deltas(shared), other._deltas(shared)
        return _of_pairs(d_BGLO, self.a_BGLI, e_BGMO, other.a_BGLI)

    def _pays(self, other: Product) -> bool:
        groups, outputs, inputs = self.d_BGLO.shape[1], self.d_BGLO.shape[3], self.width
        alike = other.d_BGLO.shape[1] == groups and other.width == inputs
        whole = groups == 1 or self.rows == other.rows
        rows = max(self.d_BGLO.shape[2], other.d_BGLO.shape[2])
        few = _DEARER * rows * (outputs + inputs) < outputs * inputs
        return alike and whole and few

    def _deltas(self, shared: RowRange) -> Tensor:
        """Returns the deltas of some elements, whose range is one of whole rows."""
        if self.d_BGLO.shape[1] > 1:
            return self.d_BGLO
        start, stop = (place // self.width - self.rows[0] for place in shared)
        return self.d_BGLO[..., start:stop]


def _of_pairs(d_BGLO: Tensor, a_BGLI: Tensor, e_BGMO: Tensor, b_BGMI: Tensor) -> Tensor:
    """Returns the inner product of two products of each sample, by pairs of rows, (B,)."""
    return (_gram(d_BGLO, e_BGMO) * _gram(a_BGLI, b_BGMI)).sum(dim=(1, 2, 3))


def _square(d_BGLO: Tensor, a_BGLI: Tensor) -> Tensor:
    """Returns the squared norm of each sample's product, (B,).

    Of the pairs of one half with the other, which there are twice, each is computed once.
    """
    groups, rows = d_BGLO.shape[1:3]
    if groups == rows == 1:
        return squares(d_BGLO.flatten(1)) * squares(a_BGLI.flatten(1))
    if rows < _HALVED:
        return _of_pairs(d_BGLO, a_BGLI, d_BGLO, a_BGLI)
    d, e = d_BGLO.tensor_split(2, dim=2)
    a, b = a_BGLI.tensor_split(2, dim=2)
    return _of_pairs(d, a, d, a) + _of_pairs(e, b, e, b) + 2 * _of_pairs(d, a, e, b)


class Lookup(Addend):
    """Deltas of each sample, (B, L, O), that are added to the rows of ids, (B, L), of a table."""

    def __init__(self, param: str, rows: RowRange, d_BLO: Tensor, ids_BL: Tensor) -> None:
        super().__init__(param, rows, d_BLO.shape[2])
        self.d_BLO, self.ids_BL = d_BLO, ids_BL

    def formed(self) -> Tensor:
        """Returns the tables."""
        samples, _, width = self.d_BLO.shape
        whole_BVO = self.d_BLO.new_zeros(samples, self.rows[1], width)
        ids_BLO = self.ids_BL[:, :, None].expand_as(self.d_BLO)
        return whole_BVO.scatter_add_(1, ids_BLO, self.d_BLO).flatten(1)

    def inner(self, other: Addend) -> Tensor:
        """As for an addend; by pairs of rows with another lookup or the product of a tied layer."""
        if isinstance(other, Lookup):
            alike_BLM = self.ids_BL[:, :, None] == other.ids_BL[:, None]
            return (_gram(self.d_BLO, other.d_BLO) * alike_BLM).sum(dim=(1, 2))
        if not (isinstance(other, Product) and self._is_like(other)):
            return super().inner(other)
        d_BMV, a_BMO = other.d_BGLO[:, 0], other.a_BGLI[:, 0]
        ids_BML = self.ids_BL[:, None].expand(-1, d_BMV.shape[1], -1)
        return (d_BMV.gather(2, ids_BML) * _gram(a_BMO, self.d_BLO)).sum(dim=(1, 2))

    def _is_like(self, other: Product) -> bool:
        """True if a product has the form of this table."""
        alike = other.rows == self.rows and other.width == self.width
        return alike and other.d_BGLO.shape[1] == 1


def _gram(one: Tensor, other: Tensor) -> Tensor:
    """Returns the inner products of rows, (..., L, M), in float64."""
    one, other = one.double(), other.double()
    return one @ other.mT


class Projected(Product):
    """Products of a weight's only slot, in one group, of which a part is sent."""

    def __init__(self, whole: Product, sent: Projection) -> None:
        super().__init__(whole.param, whole.rows, whole.d_BGLO, whole.a_BGLI)
        self._sent = sent

    def inner(self, other: Addend) -> Tensor:
        """Returns the squared norms of what is sent; nothing else adds to the weight."""
        assert other is self
        return self._sent.squared_norms(self.d_BGLO[:, 0], self.a_BGLI[:, 0])


def addends(
    slot: Slot,
    part: SampleRows,
    samples: int,
    sent: Projection | None = None,
    *,
    exact: bool = False,
) -> list[Addend]:
    """Returns what the rows of a slot add to its weight, and to its bias if it has one.

    Args:
        slot: of the rows.
        part: the rows, one or more.
        samples: B.
        sent: keeps what is sent of the weight's gradient; None for all of it.
        exact: whether they are to be in float64, as where others are added to them.
    """
    assert part.samples_N is not None
    d_GNO, where = widened(part.factors.d_GRO), places_of(part.samples_N, samples)
    d_GNO = d_GNO.double() if exact else d_GNO
    d_BGLO = where.padded(d_GNO)
    if slot.lookup:
        ids_BL = where.padded(part.factors.a_GRI[None, :, None])[:, 0, :, 0]
        return [Lookup(slot.weight, (0, slot.inputs), d_BGLO[:, 0], ids_BL)]
    rows = slot.groups * slot.outputs
    a_BGLI = where.padded(part.factors.a_GRI.to(d_GNO.dtype))
    if slot.vector and d_BGLO.shape[2] == 1:
        times_B = a_BGLI[:, 0, 0, 0]
        return [Vector(slot.weight, slot.weight_rows or (0, rows), d_BGLO[:, 0, 0], times_B)]
    if slot.vector:
        sums_BE = (d_BGLO * a_BGLI).sum(dim=2).flatten(1)
        return [Vector(slot.weight, slot.weight_rows or (0, rows), sums_BE)]
    weight = Product(slot.weight, slot.weight_rows or (0, rows), d_BGLO, a_BGLI)
    if sent is not None:
        weight = Projected(weight, sent)
    if slot.bias is None:
        return [weight]
    return [weight, Vector(slot.bias, slot.bias_rows or (0, rows), _sums(d_BGLO).flatten(1))]


def products(slot: Slot, part: SampleRows, samples: int) -> tuple[Tensor, Tensor | None]:
    """Returns each sample's product, (B, G, O, I), and with a bias sum of deltas, (B, G, O)."""
    assert part.samples_N is not None
    d_GNO, where = widened(part.factors.d_GRO), places_of(part.samples_N, samples)
    d_BGLO, a_BGLI = where.padded(d_GNO), where.padded(part.factors.a_GRI.to(d_GNO.dtype))
    return d_BGLO.mT @ a_BGLI, None if slot.bias is None else _sums(d_BGLO)


def as_vectors(
    slot: Slot, weight_BGOI: Tensor | None, bias_BGO: Tensor | None = None
) -> dict[Slot, SampleRows]:
    """Returns gradients by sample as rows of slots of vectors, one per sample."""
    found: dict[Slot, SampleRows] = {}
    if weight_BGOI is not None:
        about = {"weight_rows": slot.weight_rows, "vector": True}
        whole = Slot(slot.layer, slot.weight, slot.numel, 1, **about)
        found[whole] = row_each(weight_BGOI.flatten(1))
    if bias_BGO is not None:
        found[bias_slot(slot)] = row_each(bias_BGO.flatten(1))
    return found


def bias_sums(part: SampleRows, samples: int) -> Tensor:
    """Returns the sum of each sample's deltas, (B, G, O), in at least float32."""
    assert part.samples_N is not None
    return _sums(places_of(part.samples_N, samples).padded(widened(part.factors.d_GRO)))


def _sums(d_BGLO: Tensor) -> Tensor:
    """Returns the sum of each sample's deltas, (B, G, O); of one by itself without a copy."""
    return d_BGLO[:, :, 0] if d_BGLO.shape[2] == 1 else d_BGLO.sum(dim=2)


def squared_norms(parts: Sequence[Addend]) -> Tensor:
    """Returns the squared norm of the sum of addends, by sample, (B,)."""
    squares_B = torch.stack([one.inner(one).double().clamp_min(0) for one in parts]).sum(dim=0)
    pairs = [(one, other) for one, other in combinations(parts, 2) if one.shared(other)]
    for one, other in pairs:
        squares_B = squares_B + 2 * one.inner(other)
    return squares_B.clamp_min(0)


def squared_sample_norms(slot: Slot, part: SampleRows, samples: int) -> Tensor:
    """Squared norms of each sample's product of one slot, with its bias if it has one, (B,)."""
    assert part.samples_N is not None
    if not len(part.samples_N):
        return part.factors.d_GRO.new_zeros(samples, dtype=torch.float64)
    return squared_norms(addends(slot, part, samples))


def places_of(samples_N: Tensor, samples: int) -> _Rectangle | _Places:
    """Returns what puts rows, (G, N, W), in the places of their samples, (B, G, L, W)."""
    rows = len(samples_N)
    for positions_first in (False, True) if rows % samples == 0 else ():
        about = Samples(samples, positions_first, 0)
        if sample_of_rows(about, rows, samples_N.device).equal(samples_N):
            return _Rectangle(samples, positions_first=positions_first)
    return _Places(samples_N, samples)


class _Rectangle:
    """Rows of samples that have equally many, in order: `padded` returns views."""

    def __init__(self, samples: int, *, positions_first: bool) -> None:
        self._samples, self._positions_first = samples, positions_first

    def padded(self, t_GNW: Tensor) -> Tensor:
        if self._positions_first:
            return t_GNW.unflatten(1, (-1, self._samples)).permute(2, 0, 1, 3)
        return t_GNW.unflatten(1, (self._samples, -1)).transpose(0, 1)


class _Places:
    """Index of each of N rows among the rows of its sample."""

    def __init__(self, samples_N: Tensor, samples: int) -> None:
        self._order_N = samples_N.argsort(stable=True)
        self._sample_N = samples_N[self._order_N]
        counts_B = torch.bincount(samples_N, minlength=samples)
        start_B = counts_B.cumsum(0) - counts_B
        here_N = torch.arange(len(samples_N), device=samples_N.device)
        self._place_N = here_N - start_B[self._sample_N]
        self._shape = samples, int(counts_B.max())

    def padded(self, t_GNW: Tensor) -> Tensor:
        """(B, G, L, W), zeros behind the rows of a sample that has fewer."""
        samples, longest = self._shape
        whole_BLGW = t_GNW.new_zeros(samples, longest, t_GNW.shape[0], t_GNW.shape[2])
        whole_BLGW[self._sample_N, self._place_N] = t_GNW[:, self._order_N].transpose(0, 1)
        return whole_BLGW.transpose(1, 2)
