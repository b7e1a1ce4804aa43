"""What the rooms of outergrad say to each other: slots, units and factors.

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
"""A weight and the part of its first dimension: what a gradient belongs to."""


@dataclass(frozen=True)
class Slot:
    """One place in a layer where an outer product arises: `dW[rows] += deltaᵀ activation`.

    Attributes:
        layer: full name of the module.
        weight: full name of the weight that the product belongs to.
        outputs: O, its number of rows per group.
        inputs: I, its number of columns per group.
        bias: full name of the bias that the column sums of delta belong to, if any.
        groups: G, independent outer products stacked along the weight's first dimension.
        weight_rows: the part of the weight's first dimension, None for all of it.
        bias_rows: the part of the bias, None for all of it.
        lookup: the activations are one-hot (an embedding): ids travel in their place.
        patches: the activations are cut from the layer's input, overlapping (a convolution): the
            rows cost more to make than their product.
        recomputed: the layer's products are computed a second time to know the deltas, which
            PyTorch's kernel keeps to itself (a recurrent layer).
        vector: it stands for a vector, as a matrix of one column.
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

    def __hash__(self) -> int:
        """By its place: slots and units are looked up many times in every step."""
        return hash((self.weight, self.weight_rows))

    @property
    def place(self) -> Place:
        """The weight and the part of it: what the gradient belongs to, however it is made."""
        return self.weight, self.weight_rows

    @property
    def label(self) -> str:
        """What its bytes are booked on."""
        return self.weight

    @property
    def numel(self) -> int:
        """Elements of its part of the weight."""
        return self.groups * self.outputs * self.inputs

    @property
    def params(self) -> tuple[str, ...]:
        """Full names of the parameters that the slot feeds."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def overlaps(self, other: Slot) -> bool:
        """Whether both add to the same rows of the same weight."""
        if self.weight != other.weight:
            return False
        if self.weight_rows is None or other.weight_rows is None:
            return True
        (start, stop), (begin, end) = self.weight_rows, other.weight_rows
        return start < end and begin < stop


def bias_slot(slot: Slot) -> Slot:
    """Its bias, which it must have, as a matrix of one column."""
    assert slot.bias is not None
    numel = slot.groups * slot.outputs
    return Slot(slot.layer, slot.bias, numel, 1, weight_rows=slot.bias_rows, vector=True)


def overlapping(slots: Sequence[Slot]) -> bool:
    """Whether some of these add to the same rows of the same weight."""
    return any(a.overlaps(b) for a, b in combinations(slots, 2))


Source = Slot | Block
"""What a payload is of."""


@dataclass(frozen=True)
class Unit:
    """Slots that share parameters, directly or through each other: they travel the same way.

    Attributes:
        slots: the slots, in the order of the model; none of a block.
        params: full names of all their parameters.
        dense_numel: number of elements of these parameters.
        matrices: the parts of the weights as slots that do not overlap, for when the gradient is
            formed: a table of an embedding, a tied weight are one each. None where the slots
            leave some part of a weight out. Where the method takes vectors, these, too.
        block: what is computed again by all sites, if the unit is that.
    """

    slots: tuple[Slot, ...]
    params: tuple[str, ...]
    dense_numel: int
    matrices: tuple[Slot, ...] = ()
    block: Block | None = None

    def __hash__(self) -> int:
        """By its parameters, as for slots."""
        return hash(self.params)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What is captured of it, in the order of headers: its slots, or the block."""
        return self.slots if self.block is None else (self.block,)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Parameters that are in none of the matrices, for when the gradient is formed."""
        weights = {matrix.weight for matrix in self.matrices}
        return tuple(name for name in self.params if name not in weights)


class Route(Enum):
    """How a unit travels in one step."""

    DENSE = "dense"
    GATHER = "gather"
    """Rows of every site go to every site."""
    REDUCE = "all_reduce"
    """Thin sketches of the gradient are summed over the sites, in one round or two."""
    TWO_WAY = "two_way"
    """Rows of every site go to the one that owns the slot, which sends the merged ones to all."""


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
"""A weight gradient as its factors or, where it was formed, itself: (G, O, I)."""


def tensors_of(gradient: Gradient) -> list[Tensor]:
    """What it consists of."""
    return [gradient] if isinstance(gradient, Tensor) else [t for t in gradient if t is not None]


class Part(NamedTuple):
    """What a site has to send of one slot.

    Attributes:
        slot: the slot.
        gradient: this site's.
        rows: R, how many rows are sent of it.
    """

    slot: Slot
    gradient: Gradient
    rows: int


class Call(NamedTuple):
    """What one use of a layer leaves behind in backward.

    Attributes:
        a: what the rule gave to `tap`: the layer's input, in the layer's own shape.
        d: delta, the gradient with respect to the layer's output, in the output's shape.
    """

    a: Tensor
    d: Tensor


def place_name(place: Place) -> str:
    """As text: the name of the weight, with the rows of a part of it behind."""
    weight, rows = place
    return weight if rows is None else f"{weight}[{rows[0]}:{rows[1]}]"


StateDict = dict[str, Any]
"""What is saved of a session: names, numbers, lists and tensors, nothing else."""


@dataclass(frozen=True)
class Inheritance:
    """Which saved states of a compressor a site goes on from.

    The sites may be more or fewer than there were. What they still owe the mean gradient is the
    mean residual, so a site that takes over from some old ones counts what they had
    unsent S' / S times, S' sites after S.

    Attributes:
        place_of: every place of the model, by its name in the states.
        first: the state that all sites have in common.
        like: the state of the site that this one goes on from.
        residual: states of the sites whose residuals it takes over, if any.
        weight: how many times these count.
        predecessors: per site, this one too, the old site that it goes on from.
    """

    place_of: Mapping[str, Place]
    first: StateDict
    like: StateDict
    residual: Sequence[StateDict]
    weight: float
    predecessors: Sequence[int]

    @property
    def same_sites(self) -> bool:
        """Whether there are as many sites as there were."""
        return self.weight == 1


@dataclass(frozen=True)
class Link:
    """What the slowest site of a group has to the others.

    Attributes:
        delay_s: until a short message has arrived, seconds.
        bytes_per_s: that a site can send to all others together.
    """

    delay_s: float
    bytes_per_s: float


class Stateful(Protocol):
    """What can be saved: an optimizer, a scheduler, a scaler, a sampler."""

    def state_dict(self) -> Any:
        """What there is to save."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Goes on from it."""
        ...
