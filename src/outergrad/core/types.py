"""Data types shared by all packages of outergrad: slots, units, factors and routes.

Letters used everywhere: S sites, N rows (batch x positions) on one site, I and O input and output
width, R rows on the wire, G groups (1 except for grouped convolutions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from outergrad.core.blocks import Block

RowRange = tuple[int, int]
Place = tuple[str, RowRange | None]
"""Identifies a gradient: a weight's name and the range of its first dimension, None for all."""


class Slot(NamedTuple):
    """One outer product in a layer that adds to a gradient: `dW[rows] += deltaᵀ activation`.

    Attributes:
        layer: full name of the module.
        weight: full name of the weight that the product belongs to.
        outputs: O, its number of rows per group.
        inputs: I, its number of columns per group.
        bias: full name of the bias that the column sums of delta belong to, if any.
        groups: G, independent outer products stacked along the weight's first dimension.
        weight_rows: the part of the weight's first dimension, None for all of it.
        bias_rows: the part of the bias, None for all of it.
        lookup: the activations are one-hot (an embedding): ids are sent in their place.
        patches: the activations are overlapping patches of the layer's input (a convolution): the
            rows cost more to make than their product.
        recomputed: the layer's products are computed a second time to get the deltas, which
            PyTorch's kernel does not expose (a recurrent layer).
        vector: the slot represents a vector, as a matrix of one column.
    """

    layer: str
    weight: str
    outputs: int
    inputs: int
    bias: str | None = None
    groups: int = 1
    weight_rows: RowRange | None = None
    bias_rows: RowRange | None = None
    lookup: bool = False
    patches: bool = False
    recomputed: bool = False
    vector: bool = False

    @property
    def place(self) -> Place:
        """The weight and the range of rows: identifies the gradient, however it is computed."""
        return self.weight, self.weight_rows

    @property
    def label(self) -> str:
        """Name under which the statistics book the slot's bytes."""
        return self.weight

    @property
    def numel(self) -> int:
        """Number of elements of its part of the weight."""
        return self.groups * self.outputs * self.inputs

    @property
    def params(self) -> tuple[str, ...]:
        """Full names of the parameters that the slot feeds."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def overlaps(self, other: Slot) -> bool:
        """True if both slots add to the same rows of the same weight."""
        if self.weight != other.weight:
            return False
        if self.weight_rows is None or other.weight_rows is None:
            return True
        (start, stop), (begin, end) = self.weight_rows, other.weight_rows
        return start < end and begin < stop


def bias_slot(slot: Slot) -> Slot:
    """Returns a slot of the bias, as a matrix of one column; the given slot must have a bias."""
    assert slot.bias is not None
    numel = slot.groups * slot.outputs
    return Slot(slot.layer, slot.bias, numel, 1, weight_rows=slot.bias_rows, vector=True)


def overlapping(slots: Sequence[Slot]) -> bool:
    """True if two of the slots add to the same rows of the same weight."""
    return any(a.overlaps(b) for a, b in combinations(slots, 2))


Source = Slot | Block
"""Origin of a payload."""


@dataclass(frozen=True)
class Unit:
    """Slots that share parameters, directly or through each other: they take the same route.

    Attributes:
        slots: the slots, in the order of the model; empty for a block.
        params: full names of all their parameters.
        dense_numel: number of elements of these parameters.
        matrices: the weights, or parts of them, as slots that do not overlap, for a formed
            gradient: an embedding's table and a tied weight are one each. Empty where the slots do
            not cover the weights. If the method takes vectors, they are included.
        block: the block that all sites recompute, if the unit is one.
    """

    slots: tuple[Slot, ...]
    params: tuple[str, ...]
    dense_numel: int
    matrices: tuple[Slot, ...] = ()
    block: Block | None = None

    def __hash__(self) -> int:
        """Hashes the parameters' names alone, for speed."""
        return hash(self.params)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of the unit's payloads, in the order of headers: its slots, or the block."""
        return self.slots if self.block is None else (self.block,)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Parameters that are in none of the matrices, for a formed gradient."""
        weights = {matrix.weight for matrix in self.matrices}
        return tuple(name for name in self.params if name not in weights)


class Route(Enum):
    """Way in which a unit's gradient is exchanged in one step."""

    DENSE = "dense"
    GATHER = "gather"
    """All-gather: every site's rows go to every site."""
    REDUCE = "all_reduce"
    """All-reduce of thin sketches of the gradient, in one round or two."""
    TWO_WAY = "two_way"
    """Every site's rows go to the slot's owner, which sends the merged rows to all."""


class Factors(NamedTuple):
    """Rows whose outer product is a weight gradient, `dW_GOI = d_GROᵀ a_GRI`.

    Attributes:
        d_GRO: deltas. For a lookup slot the summed deltas of each id, (1, R, O) with O the width.
        a_GRI: activations. For a lookup slot the distinct ids, (R,), int64.
        b_GO: the bias gradient; None where it is the sum of d_GRO over the rows.
    """

    d_GRO: Tensor
    a_GRI: Tensor
    b_GO: Tensor | None = None


Gradient = Factors | Tensor
"""A weight gradient as its factors or, where it was formed, as a tensor (G, O, I)."""


def tensors_of(gradient: Gradient) -> list[Tensor]:
    """Returns the tensors that the gradient consists of."""
    return [gradient] if isinstance(gradient, Tensor) else [t for t in gradient if t is not None]


class Part(NamedTuple):
    """A site's contribution of one slot to a message.

    Attributes:
        slot: the slot.
        gradient: this site's.
        rows: R, the number of rows to send.
    """

    slot: Slot
    gradient: Gradient
    rows: int


class Call(NamedTuple):
    """Tensors that one use of a layer leaves in backward.

    Attributes:
        a: the tensor that the rule gave to `tap`: the layer's input, in the layer's own shape.
        d: delta, the gradient with respect to the layer's output, in the output's shape.
    """

    a: Tensor
    d: Tensor


def place_name(place: Place) -> str:
    """Returns a place as text: the weight's name, followed by its row range if it has one."""
    weight, rows = place
    return weight if rows is None else f"{weight}[{rows[0]}:{rows[1]}]"


StateDict = dict[str, Any]
"""Saved state of a session: names, numbers, lists and tensors, nothing else."""


@dataclass(frozen=True)
class Inheritance:
    """Saved compressor states from which a site resumes, with a possibly different number of sites.

    The sites' residuals contribute their mean to the mean gradient. So a site that takes over the
    residuals of some old sites scales them by S' / S, for S' sites after S.

    Attributes:
        place_of: every place of the model, by its name in the states.
        first: the state that all sites have in common.
        like: the state of the site that this one continues.
        residual: states of the sites whose residuals it takes over, if any.
        weight: factor by which these residuals are multiplied.
        predecessors: per site, this one included, the old site that it continues.
    """

    place_of: Mapping[str, Place]
    first: StateDict
    like: StateDict
    residual: Sequence[StateDict]
    weight: float
    predecessors: Sequence[int]

    @property
    def same_sites(self) -> bool:
        """True if there are as many sites as in the saved state."""
        return self.weight == 1


@dataclass(frozen=True)
class Link:
    """Network link of the slowest site of a group to the others.

    Attributes:
        delay_s: time until a short message has arrived, seconds.
        bytes_per_s: rate at which a site can send to all others together.
    """

    delay_s: float
    bytes_per_s: float


class Stateful(Protocol):
    """An object whose state can be saved: an optimizer, a scheduler, a scaler, a sampler."""

    def state_dict(self) -> Any:
        """Returns the state to save."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restores a saved state."""
        ...
