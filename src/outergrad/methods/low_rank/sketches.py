"""Subspace iteration on the mean gradient, by two all-reduces of thin matrices per step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outergrad.core.payload import Arrived
from outergrad.core.rounds import Sketches
from outergrad.core.types import Factors, Gradient, Part, Slot
from outergrad.linalg.orthonormal import orthonormal, principal
from outergrad.linalg.outer import formed
from outergrad.linalg.product import Product, Total, cheapest, total, unscaled
from outergrad.linalg.subspace import near_one, start
from outergrad.methods.low_rank.memory import Memories, Memory, compacted, residual_of
from outergrad.methods.low_rank.settings import LowRankSettings


@dataclass
class _Turn:
    """State of a slot between the rounds of a step.

    Attributes:
        matrix: This site's gradient plus its residual.
        whole_GOI: The same as a matrix, where it had to be formed.
        q_GIK: Directions of the first sketch, which all sites have.
        y_GOL: Image of the directions that only the memory needs.
        p_GOK: Orthonormal basis of the summed first sketch; None before that.
        residual: Unsent part of `matrix`.
    """

    matrix: Product | Total
    whole_GOI: Tensor | None
    q_GIK: Tensor
    y_GOL: Tensor
    p_GOK: Tensor | None = None
    residual: Gradient | None = None


class Subspace(Sketches):
    """Number of directions of sketches, and its adaptation to the tolerance."""

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        self._settings, self._memories = settings, memories
        self._rounds = bool(settings.codecs)

    def columns(self, slot: Slot) -> int:
        """Returns K: the rank, or what the tolerance asked for after the last step."""
        memory = self._memories[slot]
        wanted = memory.columns if memory and memory.columns else self._settings.rank
        return min(wanted, slot.outputs, slot.inputs)

    def projection(self, slot: Slot, sketch: Tensor) -> Tensor:
        """Returns the sketch flattened, without the norm that a tolerance appends to it."""
        return sketch.flatten()[: sketch.numel() - bool(self._settings.tolerance)]

    def _image(self, slot: Slot, part: Tensor, known_GRW: Tensor) -> Tensor:
        """Returns a sketch as (G, V, R), beside directions (G, R, W) of the other side."""
        groups, columns, _ = known_GRW.shape
        return self.projection(slot, part).view(groups, -1, columns).to(known_GRW.dtype)

    def _adapted(self, z_GWK: Tensor, rest_norm: Tensor) -> tuple[Tensor, int]:
        """Returns the leading directions first, and the smallest K that keeps to the tolerance.

        The norm of a mean is at most the mean of the norms, so the true error is smaller. If K is
        too small for the tolerance, a quarter more is tried.
        """
        most = self._settings.rank
        if not bool(z_GWK.isfinite().all() & rest_norm.isfinite()):
            return z_GWK, most
        left_GWK, sigma_GK = principal(z_GWK)
        largest = torch.maximum(sigma_GK.amax(), rest_norm).double()  # squares stay in range
        largest = torch.where(largest == 0, 1.0, largest)
        energy_K = (sigma_GK.double() / largest).square().sum(dim=0)
        tail_K = (
            torch.cat([energy_K, (rest_norm.double() / largest).square()[None]])
            .flip(0)
            .cumsum(0)
            .flip(0)
        )
        enough = int((tail_K > self._settings.tolerance**2 * tail_K[0]).sum())
        now = len(energy_K)
        columns = now + 1 + now // 4 if enough > now else enough
        return left_GWK, max(1, min(columns, most))

    def _basis(self, x_GWK: Tensor) -> Tensor:
        """Returns orthonormal columns, the leading directions first where sketches are rounded."""
        return principal(x_GWK)[0] if self._rounds else orthonormal(x_GWK)

    def _memory_rows(self, slot: Slot, columns: int) -> int:
        return min(self._settings.kept_triplets, slot.outputs - columns, slot.inputs - columns)


class GlobalSketches(Subspace):
    """One step of block subspace iteration per training step, each from where the last ended.

    With `M = mean_s M_s`, `P = orth(M Q)` and `Z = Mᵀ P` the estimate is `P Zᵀ`, and Z is the next
    Q. Only sums over the sites travel, so bytes do not depend on the number of sites. Source:
    Vogels, Karimireddy and Jaggi, PowerSGD, 2019, algorithm 1, here on the factors. The unsent part
    of a site is `(1 - P Pᵀ) M_s`. The memory keeps its leading triplets, found in the same two
    products.
    """

    def __init__(self, settings: LowRankSettings, memories: Memories) -> None:
        super().__init__(settings, memories)
        self._turns: dict[Slot, _Turn] = {}

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns `M_s Q`, (G, O, K)."""
        memory, columns = self._memories[slot], self.columns(slot)
        residual = residual_of(memory)
        whole_GOI, others = None, ()
        if self._settings.keeps_whole(Part(slot, gradient, columns), residual):
            count = columns
            whole_GOI = formed(gradient, residual)
            main = unscaled(whole_GOI)
        else:
            assert not isinstance(residual, Tensor)
            count = columns + self._memory_rows(slot, columns)
            main = cheapest(unscaled(gradient), count, 1, with_energy=False)
            others = () if residual is None else (unscaled(residual),)
        matrix = total(main, *others)
        q_GIL = _start(main, memory, columns, count)
        y_GOL = matrix.times(q_GIL)
        self._turns[slot] = _Turn(matrix, whole_GOI, q_GIL[..., :columns], y_GOL[..., columns:])
        return y_GOL[..., :columns]

    def turn(self, slot: Slot, y_GOK: Tensor) -> Tensor:
        """Returns `M_sᵀ P`, (G, I, K); with a tolerance flat, then the norm of the rest."""
        turn, columns = self._turns[slot], y_GOK.shape[2]
        # apart from this site's own directions, so that it is bit-equal on all sites
        turn.p_GOK = self._basis(y_GOK.to(turn.y_GOL.dtype))
        basis_GOL = turn.p_GOK
        if turn.y_GOL.shape[2]:
            others_GOL = orthonormal(torch.cat([turn.p_GOK, turn.y_GOL], dim=2))[..., columns:]
            basis_GOL = torch.cat([turn.p_GOK, others_GOL], dim=2)
        z_GIL = turn.matrix.transposed_times(basis_GOL)
        z_GIK = z_GIL[..., :columns]
        if self._settings.error_feedback and math.isfinite(z_GIL.sum().item()):
            turn.residual = self._residuals(turn, basis_GOL, z_GIL)
        if not self._settings.tolerance:
            return z_GIK
        rest_norm = turn.matrix.without(turn.p_GOK).energy().sum().sqrt()
        return torch.cat([z_GIK.flatten(), rest_norm.to(z_GIK.dtype)[None]])

    def _residuals(self, turn: _Turn, basis_GOL: Tensor, z_GIL: Tensor) -> Gradient | None:
        """Returns the unsent part; computed in `turn.whole_GOI` where that is formed."""
        assert turn.p_GOK is not None
        columns = turn.p_GOK.shape[2]
        if turn.whole_GOI is not None:
            return turn.whole_GOI.baddbmm_(turn.p_GOK, z_GIL[..., :columns].mT, alpha=-1)
        rest = Factors(basis_GOL[..., columns:].mT, z_GIL[..., columns:].mT)
        return rest if rest.d_GRO.shape[1] else None

    def end(self, slot: Slot, z: Tensor, sites: int) -> Factors:
        """Returns `P Zᵀ / S` as factors of K rows."""
        turn = self._turns.pop(slot)
        assert turn.p_GOK is not None
        p_GOK, mean = turn.p_GOK, z.to(turn.p_GOK.dtype) / sites
        q_GIK, columns = mean, None
        if self._settings.tolerance:
            mean, rest_norm = mean[:-1].view(len(p_GOK), -1, p_GOK.shape[2]), mean[-1]
            q_GIK, columns = self._adapted(mean, rest_norm)
        elif self._rounds:
            q_GIK = self._basis(mean)
        if math.isfinite(q_GIK.sum().item()):
            self._memories[slot] = compacted(Memory(_usable(q_GIK), turn.residual, columns))
        return Factors(p_GOK.mT, mean.mT)

    def first_stands_for(self, slot: Slot, part: Tensor) -> Factors:
        """Returns `Y_s Q⁺`, the smallest gradient that makes this sketch; all sites have Q."""
        q_GIK = self._turns[slot].q_GIK
        q_GIK = q_GIK.to(torch.promote_types(q_GIK.dtype, torch.float32))
        return Factors(part.to(q_GIK.dtype).mT, torch.linalg.pinv(q_GIK))

    def stands_for(self, slot: Slot, part: Tensor, mean: Arrived) -> Factors:
        """Returns `P Z_sᵀ`, the site's gradient along the directions that all sites have."""
        assert isinstance(mean, Factors)
        return Factors(mean.d_GRO, self._image(slot, part, mean.d_GRO).mT)

    def forget(self) -> None:
        """Drops the unfinished state of a discarded step."""
        self._turns.clear()


def _start(main: Product, memory: Memory | None, columns: int, count: int) -> Tensor:
    """Returns directions for the sum, then for the memory; missing ones are fixed random ones."""
    if memory is None:
        return start(main.a_GNI, count, None)
    q_GIK = memory.q_GIR[..., :columns]
    found = [pad(q_GIK, (0, columns - q_GIK.shape[2]))]
    if count > columns and isinstance(memory.residual, Factors):
        found.append(near_one(memory.residual.a_GRI.mT).to(q_GIK.dtype))
    x_GIL = torch.cat(found, dim=2).to(main.dtype)
    complete = q_GIK.shape[2] == columns and x_GIL.shape[2] == count
    return x_GIL if complete else start(main.a_GNI, count, x_GIL)


def _usable(q_GIK: Tensor) -> Tensor:
    """Returns columns of length one; fixed random ones replace columns of zeros."""
    size_G1K = q_GIK.norm(dim=1, keepdim=True)
    unit_GIK = q_GIK / size_G1K
    if math.isfinite((unit_GIK.sum() + size_G1K.sum()).item()):
        return unit_GIK
    safe_GIK = q_GIK / q_GIK.abs().amax(dim=1, keepdim=True)  # the squares left the dtype's range
    unit_GIK = safe_GIK / safe_GIK.norm(dim=1, keepdim=True)
    if math.isfinite(unit_GIK.sum().item()):
        return unit_GIK
    return start(q_GIK.mT, q_GIK.shape[2], unit_GIK)


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

    def stands_for(self, slot: Slot, part: Tensor, mean: Arrived) -> Factors:
        """Returns `P Z_sᵀ` or `Y_s Qᵀ`, along the directions that all sites have."""
        assert isinstance(mean, Factors)
        left = self._is_left(slot)  # the memory that `end` has set is in use after the step
        known = mean.d_GRO if left else mean.a_GRI
        return _factors(known.mT, self._image(slot, part, known), left=left)

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
    known = None
    if memory is not None and memory.q_GIR.shape[2] and not memory.own:
        known = memory.q_GIR
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
