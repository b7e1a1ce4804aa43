"""Gathered triplets: every site sends its own leading ones to all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outergrad.core.payload import EncodedRows
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Part,
    Place,
    Slot,
    StateDict,
    place_name,
)
from outergrad.linalg.compress import compress
from outergrad.linalg.low_rank import LowRank
from outergrad.linalg.outer import (
    apart,
    formed,
    matrices_apart,
    padded,
    row_sum,
    shape_of,
    together,
)
from outergrad.linalg.power import canonical
from outergrad.linalg.product import cheapest, total, unscaled
from outergrad.linalg.subspace import OVERSAMPLING, start, warm_iteration
from outergrad.methods.common import without_silent_ids
from outergrad.methods.low_rank.budget import Budget
from outergrad.methods.low_rank.memory import (
    Memories,
    Memory,
    compact,
    encoded,
    finite_or_none,
    residual_of,
    with_loss,
)
from outergrad.methods.low_rank.settings import LowRankSettings

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


_SPARE_PER_ROW = 2
"""Triplets per spare direction; spare ones keep the error of one iteration within 2 % of the best
(`benchmarks/errors.py`)."""

_SPARE_PER_ROW_LATER = 4
"""Triplets per spare direction of a budget that has found its shares, where the whole rest is
remembered: what one iteration misses is sent later."""

_KNOWN_SHARE = 0.5
"""Share of the directions to iterate on that must be known: one iteration finds the others less
well. With a budget all must be known, because ranks grow."""

_ANY_ERROR = 1e-9
"""Tolerance that cuts nothing off, but is above zero, so that the error is computed."""


class Gathered:
    """Finds the triplets of this site's gradients, and keeps what is not sent as residuals."""

    def __init__(
        self, settings: LowRankSettings, memories: Memories, budget: Budget | None = None
    ) -> None:
        self._settings, self._memories, self.budget = settings, memories, budget
        self._alternates = settings.alternates
        self._rows: dict[tuple[Place, int], int] = {}
        self._wanted: dict[Place, int] = {}

    def sent_rows(self, slot: Slot, most: int, site: int) -> int:
        """Returns the triplets that the site has announced, at most `most`."""
        return min(most, self._rows.get((slot.place, site), most))

    def wanted_rows(self, slot: Slot) -> int:
        """Returns the rank that the tolerance asks for."""
        return self._wanted.get(slot.place, self._settings.rank)

    def agree(self, slot: Slot, site: int, rows: int) -> None:
        """Records the number of triplets that a site will send in the next step."""
        self._rows[slot.place, site] = max(1, min(rows, self._settings.rank))

    def common_state(self) -> StateDict:
        """Returns, by place, the rows that every site will send, which all sites know."""
        sent_rows: dict[str, list[int]] = {}
        for (place, _), rows in sorted(self._rows.items(), key=lambda item: item[0][1]):
            sent_rows.setdefault(place_name(place), []).append(rows)
        return {"sent_rows": sent_rows}

    def own_state(self) -> StateDict:
        """Returns, by place, the rows that this site would send."""
        return {"wanted_rows": {place_name(p): rows for p, rows in self._wanted.items()}}

    def load(self, inheritance: Inheritance) -> None:
        """Continues with the ranks of each site's predecessor."""
        place_of, wanted = inheritance.place_of, inheritance.like["own"]["wanted_rows"]
        sent_rows = inheritance.first["common"]["sent_rows"]
        self._wanted = {place_of[name]: rows for name, rows in wanted.items()}
        self._rows = {
            (place_of[name], site): rows[old]
            for name, rows in sent_rows.items()
            for site, old in enumerate(inheritance.predecessors)
        }

    def compress(self, parts: Sequence[Part]) -> list[Factors | EncodedRows]:
        """Returns the leading triplets of each gradient plus its residual."""
        sent: dict[Slot, Factors | EncodedRows] = {}
        found: list[Found] = []
        usual: list[Warm] = []
        for part in parts:
            warm = self._warm(part)
            if warm is not None:
                usual.append(warm)
            elif (exact := self._exact(part)) is not None:
                sent[part.slot] = exact
            else:
                found.append(self._alone(part))
        for places in bundles(tuple(warm.form for warm in usual)):
            members = [usual[i] for i in places]
            found.append(Found([warm.part for warm in members], *compress_together(members)))
        sent.update(self._kept(found))
        return [sent[part.slot] for part in parts]

    def _warm(self, part: Part) -> Warm | None:
        """Returns the part if one iteration from the last directions is enough, else None."""
        settings, memory = self._settings, self._memories[part.slot]
        by_choice = settings.solver != "auto" or settings.iterations or settings.tolerance
        if memory is None or by_choice:
            return None
        residual = residual_of(memory)
        if self._is_exact(part, residual):
            return None
        whole = settings.keeps_whole(part, residual)
        if residual is not None and not isinstance(residual, Tensor if whole else Factors):
            return None
        if whole and isinstance(part.gradient, Factors):
            return None
        rows, inputs, outputs = shape_of(part.gradient)
        if isinstance(residual, Factors):
            rows += residual.d_GRO.shape[1]
        columns = min(self._columns(part.rows, whole=whole), inputs, outputs)
        known = memory.right if memory.left else memory.q_GIR  # spares a call for each layer
        if known is None:
            return None
        share = _KNOWN_SHARE if self.budget is None else 1.0
        # either an exact decomposition of so few rows costs nothing, or too little is known
        if rows < columns or known.shape[2] < share * columns:
            return None
        if known.shape[2] < columns:  # low rank at first, as of a head of few classes
            known = start(known.mT, columns, known)
        return Warm(part, residual, whole, known, columns)

    # -- one by one -----------------------------------------------------------------------------

    def _exact(self, part: Part) -> Factors | None:
        """Returns the exact payload, where the rows hold everything; None otherwise."""
        slot, gradient, rows = part
        if isinstance(gradient, Tensor):
            return None
        if slot.lookup:
            return without_silent_ids(gradient)
        if not self._is_exact(part, residual_of(self._memories[slot])):
            return None
        return canonical(gradient, rows, bias=slot.bias is not None)

    def _alone(self, part: Part) -> Found:
        slot, gradient, rows = part
        residual = compact(residual_of(self._memories[slot]))
        if not self._settings.keeps_whole(part, residual):
            assert not isinstance(residual, Tensor)
            columns = self._columns(self._needed(rows), whole=False)
            return Found([part], self._found(slot, gradient, columns, residual))
        whole_GOI = formed(gradient, residual)
        columns = self._columns(self._needed(rows), whole=True)
        return Found([part], self._found(slot, whole_GOI, columns), whole_GOI)

    def _needed(self, rows: int) -> int:
        """Returns the triplets for this step and for the choice of the next one's rank."""
        return max(rows, self._settings.rank) if self._settings.tolerance else rows

    def _is_exact(self, part: Part, residual: Gradient | None) -> bool:
        """True if the rows hold all that is to be sent."""
        slot, gradient, rows = part
        if isinstance(gradient, Tensor):
            return False
        if slot.lookup:
            return True
        all_rows = min(gradient.d_GRO.shape[1], slot.outputs, slot.inputs)
        holds_all = rows >= all_rows and not self._settings.adapts and residual is None
        return holds_all and not self._settings.keeps_loss  # a loss has to be remembered

    def _found(
        self, slot: Slot, gradient: Gradient, columns: int, residual: Factors | None = None
    ) -> LowRank:
        """Returns `columns` triplets, and notes the rank that the tolerance asks for."""
        settings, memory = self._settings, self._memories[slot]
        known = None if memory is None else memory.right
        found = compress(
            gradient,
            columns,
            _ANY_ERROR if settings.tolerance else 0.0,
            solver=settings.solver,
            iterations=settings.iterations,
            q_GIR=None if known is None else compact(known),
            plus=residual,
        )
        if settings.tolerance:
            wanted = found.rank_within(settings.tolerance)
            self._wanted[slot.place] = max(1, min(settings.rank, wanted))
        return replace(found, a_GRI=compact(found.a_GRI))  # a part of it is remembered

    # -- one by one and batched -------------------------------------------------------------------

    def _columns(self, rows: int, *, whole: bool) -> int:
        """Returns the number of directions to iterate on: sent, kept and spare ones."""
        if whole and self.budget is not None and not self.budget.grows:
            return rows + max(OVERSAMPLING, rows // _SPARE_PER_ROW_LATER)
        extra = 0 if whole else self._settings.kept_triplets
        return rows + extra + max(OVERSAMPLING, rows // _SPARE_PER_ROW)

    def _kept(self, found: Sequence[Found]) -> dict[Slot, Factors | EncodedRows]:
        """Returns the payloads of the triplets; remembers all directions, and what is not sent."""
        sent = {slot: factors for one in found for slot, factors in one.sent().items()}
        payloads: Sequence[Factors | EncodedRows] = list(sent.values())
        arrives = sent
        if self._settings.keeps_loss:
            payloads, arrive_K = encoded(list(sent.values()), self._settings.codecs)
            arrives = _finite_ones(dict(zip(sent, arrive_K, strict=True)), sent)
        for one in found:
            self._remember(one, sent, arrives)
        parts = [part for one in found for part in one.parts]
        pairs = zip(parts, payloads, strict=True)
        return {part.slot: _with_bias(part, payload) for part, payload in pairs}

    def _remember(
        self, one: Found, sent: Mapping[Slot, Factors], arrives: Mapping[Slot, Factors]
    ) -> None:
        slots, triplets = one.slots, one.triplets
        residual = self._residuals(one, sent, arrives)
        starts = apart(Factors(triplets.d_GRO, triplets.a_GRI), slots)
        finite = _finite(triplets.sigma_GR, slots)
        self._note(slots, triplets.sigma_GR)
        alternates = self._alternates
        for slot, is_finite, factors, rest in zip(slots, finite, starts, residual, strict=True):
            if is_finite:
                memory = Memory(factors.a_GRI.mT, rest)
                self._memories[slot] = self._before_sketches(slot, memory) if alternates else memory

    def _before_sketches(self, slot: Slot, memory: Memory) -> Memory:
        """Returns a memory of triplets behind which a sketch may come, whose side is agreed on."""
        before = self._memories[slot]
        columns, left = (None, False) if before is None else (before.columns, before.left)
        return replace(memory, columns=columns, left=left, own=True)

    def _note(self, slots: Sequence[Slot], sigma_GR: Tensor) -> None:
        if self.budget is not None:
            for slot, sigma in zip(slots, sigma_GR.split([s.groups for s in slots]), strict=True):
                self.budget.note(slot, sigma)

    def _residuals(
        self, one: Found, sent: Mapping[Slot, Factors], arrives: Mapping[Slot, Factors]
    ) -> Sequence[Gradient | None]:
        slots, rows, keeps_loss = one.slots, one.rows, self._settings.keeps_loss
        if one.whole_GOI is not None:
            lost = together([arrives[slot] for slot in slots]) if keeps_loss else one.leading
            assert not isinstance(lost, Tensor)
            return matrices_apart(without(one.whole_GOI, lost), slots)
        residual: Sequence[Factors | None] = [None] * len(slots)
        kept, found = self._settings.kept_triplets, one.triplets
        if kept and found.rank > rows:
            more = slice(rows, rows + kept)
            residual = apart(Factors(found.d_GRO[:, more].clone(), found.a_GRI[:, more]), slots)
        if not keeps_loss:
            return residual
        pairs = zip(slots, residual, strict=True)
        return [with_loss(rest, sent[slot], arrives[slot], kept) for slot, rest in pairs]


def _finite_ones(
    arrives: Mapping[Slot, Factors], sent: Mapping[Slot, Factors]
) -> dict[Slot, Factors]:
    """Returns what arrives; what was sent where that is not finite, so that no loss is kept."""
    sums = [t.sum() for factors in arrives.values() for t in (factors.d_GRO, factors.a_GRI)]
    if not sums or math.isfinite(torch.stack(sums).sum().item()):
        return dict(arrives)
    return {slot: finite_or_none(factors) or sent[slot] for slot, factors in arrives.items()}


def _finite(sigma_GR: Tensor, slots: Sequence[Slot]) -> list[bool]:
    """Returns for each slot whether all of its singular values are finite."""
    if math.isfinite(sigma_GR.sum().item()):
        return [True] * len(slots)
    parts = sigma_GR.split([slot.groups for slot in slots])
    return [math.isfinite(part.sum().item()) for part in parts]


def _with_bias(part: Part, sent: Factors | EncodedRows) -> Factors | EncodedRows:
    """Adds the bias gradient, which triplets cannot give, to a payload found from factors."""
    slot, gradient, _ = part
    if slot.bias is None or isinstance(gradient, Tensor):
        return sent
    return sent._replace(b_GO=row_sum(gradient.d_GRO))
