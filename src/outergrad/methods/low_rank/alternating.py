"""Alternating sketches: one all-reduce of one thin matrix per step, on one side in turn."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.types import Factors, Gradient, Part, Slot
from outergrad.linalg.orthonormal import orthonormal
from outergrad.linalg.outer import formed
from outergrad.linalg.product import Product, cheapest, unscaled
from outergrad.linalg.subspace import near_one, start
from outergrad.linalg.total import Total, total
from outergrad.methods.low_rank.memory import Memories, Memory, compacted, residual_of
from outergrad.methods.low_rank.settings import LowRankSettings
from outergrad.methods.low_rank.sketches import Subspace


class _Begun(NamedTuple):
    """State of a slot between `begin` and `end` of a step.

    Attributes:
        basis_GWK: Directions common to all sites.
        left: True if they are directions of the outputs.
        residual: Unsent part of this site's gradient.
    """

    basis_GWK: Tensor
    left: bool
    residual: Gradient | None


class AlternatingSketches(Subspace):
    """Half a step of block subspace iteration on the mean gradient per training step.

    Let `M = mean_s M_s`, and P be orthonormal and equal on all sites. The sketch is `Z = Mᵀ P`, the
    estimate is `P Zᵀ`, and `Q = orth(Z)`. The next step treats Mᵀ likewise: `Y = M Q`, `Y Qᵀ`, and
    `P = orth(Y)`. A step has one all-reduce, of half the bytes of both. Source: Zhang, Zhang, Shi,
    Chu and Li, ACP-SGD, 2023, here on the factors. The unsent part of a site is `(1 - P Pᵀ) M_s`.
    The memory keeps as many of its directions as it may, found in the same product: its two sides
    take turns, too.

    Letters: W is the width of the side whose directions are known, V that of the other one.
    """

    rounds = 1

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        super().__init__(settings, memories)
        self._begun: dict[Slot, _Begun] = {}

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns (G, V, K); with a tolerance flat, and the norm of the rest behind it."""
        return self._shape(slot, left=self._is_left(slot))

    def shape_ahead(self, slot: Slot) -> tuple[int, ...]:
        """Returns the shape for the other side, if K stays as it is."""
        return self._shape(slot, left=not self._is_left(slot))

    def _shape(self, slot: Slot, *, left: bool) -> tuple[int, ...]:
        shape = slot.groups, slot.inputs if left else slot.outputs, self.columns(slot)
        return (math.prod(shape) + 1,) if self._settings.tolerance else shape

    def _is_left(self, slot: Slot) -> bool:
        memory = self._memories[slot]
        return memory is not None and memory.left

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns `M_sᵀ P` or `M_s Q`, and keeps the unsent rest for `end`."""
        memory, columns, left = self._memories[slot], self.columns(slot), self._is_left(slot)
        residual = residual_of(memory)
        whole_GOI, matrix, count = self._matrix(slot, gradient, residual, columns)
        if not left:
            matrix = matrix.transposed()
        basis_GWL = _directions(matrix, memory, columns, count)
        image_GVL = matrix.transposed_times(basis_GWL)
        basis_GWK, sketch_GVK = basis_GWL[..., :columns], image_GVL[..., :columns]
        rest, rest_norm = None, None
        if self._settings.tolerance:
            rest_norm = matrix.without(basis_GWK).energy().sum().sqrt().to(sketch_GVK.dtype)
        if self._settings.error_feedback and math.isfinite(image_GVL.sum().item()):
            rest = _rest(whole_GOI, basis_GWL, image_GVL, columns, left=left)
        self._begun[slot] = _Begun(basis_GWK, left, rest)
        if rest_norm is None:
            return sketch_GVK
        return torch.cat([sketch_GVK.flatten(), rest_norm[None]])

    def _matrix(
        self, slot: Slot, gradient: Gradient, residual: Gradient | None, columns: int
    ) -> tuple[Tensor | None, Product | Total, int]:
        """Returns `M_s`, also formed if all of its rest is kept, and the number of directions."""
        if self._settings.keeps_whole(Part(slot, gradient, columns), residual):
            whole_GOI = formed(gradient, residual)
            return whole_GOI, unscaled(whole_GOI), columns
        assert not isinstance(residual, Tensor)
        count = columns + self._memory_rows(slot, columns)
        # a sweep counts as two products, and there is only one: half of the columns
        main = cheapest(unscaled(gradient), -(-count // 2), 1, with_energy=False)
        others = () if residual is None else (unscaled(residual),)
        return None, total(main, *others), count

    def end(self, slot: Slot, z: Tensor, sites: int) -> Factors:
        """Returns `P Zᵀ / S` or `Y Qᵀ / S` as factors of K rows."""
        basis_GWK, left, rest = self._begun.pop(slot)
        mean, wanted = z.to(basis_GWK.dtype) / sites, None
        if self._settings.tolerance:
            mean, rest_norm = mean[:-1].view(len(basis_GWK), -1, basis_GWK.shape[2]), mean[-1]
            directions_GVK, wanted = self._adapted(mean, rest_norm)
        else:
            # apart from this site's own directions, so that it is bit-equal on all sites
            directions_GVK = self._basis(mean)
        if math.isfinite(directions_GVK.sum().item()):
            memory = Memory(directions_GVK, rest, wanted, left=not left)
            self._memories[slot] = compacted(memory)
        return _factors(basis_GWK, mean, left=left)

    def forget(self) -> None:
        """Drops the unfinished state of a discarded step."""
        self._begun.clear()


def _factors(basis_GWR: Tensor, image_GVR: Tensor, *, left: bool) -> Factors:
    pair = basis_GWR.mT, image_GVR.mT
    return Factors(*pair) if left else Factors(*pair[::-1])


def _rest(
    whole_GOI: Tensor | None, basis_GWL: Tensor, image_GVL: Tensor, columns: int, *, left: bool
) -> Gradient | None:
    """Returns the unsent part: all of it, computed in `whole_GOI`, or along unsent directions."""
    if whole_GOI is not None:
        sent = _factors(basis_GWL, image_GVL, left=left)
        return whole_GOI.baddbmm_(sent.d_GRO.mT, sent.a_GRI, alpha=-1)
    if basis_GWL.shape[2] == columns:
        return None
    return _factors(basis_GWL[..., columns:], image_GVL[..., columns:], left=left)


def _directions(matrix: Product | Total, memory: Memory | None, columns: int, count: int) -> Tensor:
    """Returns orthonormal directions (G, W, L): K common ones, then those of this site's memory.

    Fixed random directions replace those that are missing.
    """
    like_GNW = matrix.scale_G.new_empty(len(matrix.scale_G), 0, matrix.outputs, dtype=matrix.dtype)
    known = memory.q_GIR if memory is not None and memory.q_GIR.shape[2] else None
    shared_GWK = start(like_GNW, columns, known)
    if known is None or known.shape[2] < columns:
        shared_GWK = orthonormal(shared_GWK)
    if count == columns:
        return shared_GWK
    if memory is not None and isinstance(memory.residual, Factors):
        kept = memory.residual.d_GRO if memory.left else memory.residual.a_GRI
        kept_GWR = near_one(kept.mT).to(shared_GWK)
    else:  # no memory yet: one iteration on this site's own gradient
        random_GWR = start(like_GNW, count - columns, None)
        kept_GWR = near_one(matrix.times(near_one(matrix.transposed_times(random_GWR))))
    both_GWL = start(like_GNW, count, torch.cat([shared_GWK, kept_GWR], dim=2))
    return torch.cat([shared_GWK, orthonormal(both_GWL)[..., columns:]], dim=2)
