"""Sparse gradients: sites send a few entries of each, and the others in later steps."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from outergrad.core.coding import Codecs, Wire, drops, nbytes
from outergrad.core.payload import Arrived, Entries, Payload
from outergrad.core.reasons import Why
from outergrad.core.rounds import Merger, Sketches
from outergrad.core.transport import Capability
from outergrad.core.types import (
    Factors,
    Gradient,
    Inheritance,
    Part,
    Place,
    Route,
    Slot,
    StateDict,
    Unit,
    place_name,
)
from outergrad.drift.on_drift import OnDrift
from outergrad.linalg.finite import is_finite
from outergrad.linalg.outer import formed, widened
from outergrad.linalg.projections import OnEntries
from outergrad.linalg.selection import above, blocks_of, leading_blocks, random_k, top_k
from outergrad.methods.common import Settings, require
from outergrad.methods.entries import DrawnForm, EntriesForm, Picked, written
from outergrad.methods.formed import MatrixCompressor
from outergrad.methods.residuals import (
    ByPlace,
    Remembering,
    Saved,
    inherited_memories,
    inherited_residual,
    saved_residual,
)

Select = Literal["threshold", "topk", "blocks", "random", "random_blocks"]

_FIRST_DENSITY = 0.25
_STAGES = 4
"""Stages of a warm-up; the density falls by the same factor from each to the next."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Sparse(Settings):
    """Sites send a few entries of each weight gradient, and the others in later steps.

    Choose it where gradients have few large entries, or to compare with the literature on sparse
    communication. For gradients try `og.RankDAD` first: it reached a higher accuracy at the same
    bytes on all models that were compared (docs/paper.md). Choose random blocks in `og.wire.Sign()`
    under Muon, with `error_reset` of `og.LocalSteps` (docs/fewest-bytes.md).

    Biases, norms and other vectors travel whole by default, and so does a weight whose dense
    gradient is fewer bytes.

    Sources: Aji and Heafield, 2017, for the largest entries; Lin et al., "Deep Gradient
    Compression", arXiv 1712.01887, for momentum and warm-up; Foroutan Eghlidi and Jaggi, "Sparse
    Communication for Training Deep Networks", arXiv 2009.09271, for the choices; Abdelmoniem et
    al., SIDCo, arXiv 2101.10761, for the threshold.

    Attributes:
        density: Share of the entries of a weight that is sent per step, in (0, 1].
        select: Which entries are sent. "topk": those of largest magnitude. "threshold": the same
            entries, found faster by an estimated threshold. "blocks": the blocks of `block` entries
            with the largest norm, whose places are fewer bytes. "random": the same random entries
            on all sites, so that no places are sent. Values are all-reduced, so that bytes do not
            grow with the sites, unless `wire` drops numbers: then they are gathered.
            "random_blocks": likewise, but whole blocks of consecutive entries.
        block: Entries of a block.
        error_feedback: True if the unsent part of one step is added to the next gradient, in a
            memory of the size of the model. No residual is kept of weights all of whose entries
            are sent and which `og.optim.OuterMuon` makes orthonormal, except with `momentum`.
        momentum: Momentum correction: a site sums up its gradients with this momentum before it
            chooses entries. Use an optimizer without momentum for these weights then. Parameters
            that travel whole get no momentum from this: see `session.coverage()`. 0 for none.
        warmup: Shared steps in which the density falls from 0.25, in four stages; 0 for none.
        seed: Seed of the random selections.
        wire: Codecs of `og.wire` for the values. With error feedback their loss is sent later.
            Where sums travel, of random selections in `og.wire.BF16()`, a site sends later what it
            rounds before summation, but the rounding of the sum, at most 2⁻⁹ of it per site, is
            known to no site and is lost.
        vectors: Codecs of `og.wire` for biases, norms and other vectors, all of whose entries are
            sent in every step. Choose them where so few bytes are sent that vectors in float32 are
            a large part of them.
        reduce: How values in few bits of drawn entries travel. "gather": each site sends its own to
            all others. "two_way": each site sends them to a layer's owner, which sends their mean,
            in the same bits, to all. Choose it among three and more sites: a site then sends up to
            twice its values, however many sites there are, where "gather" sends them to S - 1. With
            error feedback the owner sends later what it rounds.
        always: Sends entries even where the dense gradient is fewer bytes.
        bucket_bytes: Payload of one message, bytes, before the next layer opens another.
        every: k: gradients are shared at every k-th synchronised backward pass only. Until then
            each site sums up its gradients; their mean is shared (docs/methods.md). Or
            `og.OnDrift(...)`: whenever a site's data drift.
    """

    density: float = 0.01
    select: Select = "threshold"
    block: int = 64
    error_feedback: bool = True
    momentum: float = 0.0
    warmup: int = 0
    seed: int = 0
    wire: Wire = ()
    vectors: Wire = ()
    reduce: Literal["gather", "two_way"] = "gather"
    always: bool = False
    bucket_bytes: int = 1 << 16
    every: int | OnDrift = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.density <= 1, self, "density", "a number in (0, 1]")
        require(self.select in get_args(Select), self, "select", f"one of {get_args(Select)}")
        require(self.block >= 1, self, "block", "1 or more")
        require(0 <= self.momentum < 1, self, "momentum", "a number in [0, 1)")
        remembers = self.error_feedback or not self.momentum
        require(remembers, self, "momentum", "0 without error_feedback: momentum is remembered")
        require(self.warmup >= 0, self, "warmup", "a number of steps, 0 for none")
        picks = any(codec.picks for codec in self.codecs)
        require(not picks, self, "wire", "codecs that keep all values: density= leaves some out")
        require(self.reduce in ("gather", "two_way"), self, "reduce", "'gather' or 'two_way'")
        merges = self.draws and drops(self.codecs)
        places = "'gather', or random entries in a wire that drops numbers, as og.wire.Sign()"
        require(merges or self.reduce == "gather", self, "reduce", places)
        gathers = not self.vectors or not self.sums
        why = f"(), or a wire that drops numbers: select={self.select!r} adds up what is sent"
        require(gathers, self, "vectors", why)

    @property
    def codecs(self) -> Codecs:
        """Codecs of `wire`, as a tuple."""
        return cast(Codecs, self.wire)

    @property
    def vector_codecs(self) -> Codecs:
        """Codecs of `vectors`, as a tuple."""
        return cast(Codecs, self.vectors)

    def density_at(self, step: int) -> float:
        """Returns the density of a shared step, by its number: higher during the warm-up."""
        if step >= self.warmup or self.density >= _FIRST_DENSITY:
            return self.density
        stage = step * _STAGES // self.warmup
        return _FIRST_DENSITY * (self.density / _FIRST_DENSITY) ** (stage / _STAGES)

    @property
    def draws(self) -> bool:
        """True if entries are drawn: all sites select the same places, and send none."""
        return self.select.startswith("random")

    @property
    def sums(self) -> bool:
        """True if values are summed: all sites select the same places, and codecs allow it."""
        return self.draws and not drops(self.codecs)

    @property
    def chosen_together(self) -> int:
        """Number of consecutive entries that are sent or left out together."""
        return self.block if self.select.endswith("blocks") else 1

    def compressor(self) -> SparseCompressor:
        """Returns a new compressor with these settings."""
        return SparseCompressor(self)


_WHICH: dict[Select, str] = {
    "threshold": "the largest",
    "topk": "the largest",
    "blocks": "in blocks of {block}",
    "random": "the same on all sites",
    "random_blocks": "in blocks of {block}, the same on all sites",
}


class _Chosen(NamedTuple):
    """Values of one gradient that are sent, and all that is due, before codecs.

    Attributes:
        slot: The slot.
        due_N: The gradient plus the residual, flat.
        velocity_N: Momentum of the gradients; None without momentum correction.
        blocks_B: Numbers of the selected blocks, sorted.
        picked: Their entries.
        values_K: Values of these entries.
        finite: Whether all that is due is finite.
        dtype: Dtype in which values travel without codecs.
    """

    slot: Slot
    due_N: Tensor
    velocity_N: Tensor | None
    blocks_B: Tensor
    picked: Picked
    values_K: Tensor
    finite: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class _Memory:
    """Memory of one slot, flattened.

    Attributes:
        residual_N: Entries that have not been sent.
        velocity_N: Momentum of the gradients; None without momentum correction.
    """

    residual_N: Tensor
    velocity_N: Tensor | None = None


class SparseCompressor(MatrixCompressor, Remembering[_Memory]):
    """Sends a few entries of each weight gradient, and keeps the others as the residual."""

    why = Why.SPARSE

    def __init__(self, settings: Sparse) -> None:
        self.settings, self.forced = settings, settings.always
        self.bucket_bytes, self.wire = settings.bucket_bytes, settings.codecs
        self.takes_vectors = bool(settings.vectors)
        self.entries = EntriesForm(settings.chosen_together)
        drawn = DrawnForm(self.entries, self.drawn)
        self.form = self._form = drawn if settings.draws else self.entries
        self._memories = ByPlace[_Memory](lambda memory: memory)
        self.sketches = SharedEntries(self) if settings.sums else None
        self.sums_formed = self.sends_known = settings.sums
        self.way = Route.REDUCE if settings.sums else Route(settings.reduce)
        if self.way == Route.TWO_WAY:
            self.merger = MergedEntries(self)
            self.needs = frozenset({Capability.ALL_TO_ALL})
        self._drawn: dict[tuple[Place, int, torch.device], Tensor] = {}
        """Blocks that were drawn in this step."""
        self.steps, self.phase = 0, settings.density_at(0)
        self._forgotten: Set[str] = frozenset()

    # -- how many entries ---------------------------------------------------------------------

    def count(self, slot: Slot) -> int:
        """Returns K, the number of entries of a slot that are sent in this step."""
        if slot.vector:
            return slot.numel
        wanted = max(1, round(self.settings.density_at(self.steps) * slot.numel))
        if wanted >= slot.numel:
            return slot.numel
        return blocks_of(slot.numel, wanted, self.entries.block)[1]

    def sent_rows(self, slot: Slot, rows: int, site: int) -> int:
        """Returns K, equal for all sites that have a gradient; 0 for a site without one."""
        return self.count(slot) if rows else 0

    def payload_bytes(self, slot: Slot, count: int) -> int:
        """Returns the bytes of the values, and of their places if these are sent."""
        fields = self.form.fields(slot, count, torch.float32, None, self.codecs(slot))
        return sum(nbytes(field.codecs, field.shape, field.dtype) for field in fields)

    def codecs(self, slot: Slot) -> Codecs:
        """Returns the codecs of a slot's values."""
        return self.settings.vector_codecs if slot.vector else self.wire

    # -- entries --------------------------------------------------------------------------------

    def compress(self, parts: Sequence[Part]) -> list[Payload]:
        """Returns the selected entries of each gradient plus its residual."""
        chosen = [self._chosen(*part) for part in parts]
        places = defaultdict[Codecs, list[int]](list)
        for k, one in enumerate(chosen):
            places[self.codecs(one.slot)].append(k)
        payloads: dict[int, Payload] = {}
        for codecs, alike in places.items():
            values, dtypes = [chosen[k].values_K for k in alike], [chosen[k].dtype for k in alike]
            for k, (sent, arrives_K) in zip(alike, written(codecs, values, dtypes), strict=True):
                one = chosen[k]
                if one.finite:
                    self.keep(one.slot, one.due_N, one.velocity_N, one.picked, arrives_K)
                payloads[k] = self._form.payload(sent, one.blocks_B, one.slot)
        return [payloads[k] for k in range(len(chosen))]

    def _chosen(self, slot: Slot, gradient: Gradient, count: int) -> _Chosen:
        due_N, velocity_N = self.due(slot, gradient)
        finite = is_finite(due_N)
        blocks_B = self._selected(slot, due_N, count, finite=finite)
        picked = self.entries.picked(blocks_B, len(due_N))
        values_K = self.seen_by_all(picked.of(due_N), finite=finite)
        dtype = gradient.dtype if isinstance(gradient, Tensor) else values_K.dtype
        return _Chosen(slot, due_N, velocity_N, blocks_B, picked, values_K, finite, dtype)

    def _selected(self, slot: Slot, due_N: Tensor, count: int, *, finite: bool) -> Tensor:
        """Returns the numbers of the selected blocks, sorted; of blocks of one entry, the places.

        A threshold cannot be estimated if entries are not finite; `top_k` selects these first.
        """
        if self.settings.draws:
            return self.drawn(slot, count, due_N.device)
        if count == len(due_N):
            return torch.arange(-(-count // self.entries.block), device=due_N.device)
        if self.entries.block > 1:
            return leading_blocks(due_N, count, self.entries.block)
        estimates = self.settings.select == "threshold" and finite
        return above(due_N, count) if estimates else top_k(due_N, count)

    def drawn(self, slot: Slot, count: int, device: torch.device) -> Tensor:
        """Returns blocks that differ between steps and between weights, but not between sites."""
        key = slot.place, count, device
        if key not in self._drawn:  # a site draws for its own values, and reads those of all sites
            own = zlib.crc32(place_name(slot.place).encode())
            seed = (self.settings.seed << 96) + (own << 64) + self.steps
            self._drawn[key] = random_k(*self.entries.blocks(slot, count), seed, device)
        return self._drawn[key]

    def known(self, unit: Unit, slot: Slot, device: torch.device) -> OnEntries | None:
        """Returns the entries that are drawn for this step; None if the unit travels dense."""
        assert self.cost is not None
        if not self.sends_known or not self.break_even(unit, self.cost.sites):
            return None
        picked = self.entries.picked(self.drawn(slot, self.count(slot), device), slot.numel)
        places_K = picked.of(torch.arange(slot.numel, device=device))
        return OnEntries(places_K, (slot.groups * slot.outputs, slot.inputs))

    def seen_by_all(self, values_K: Tensor, *, finite: bool) -> Tensor:
        """Returns the values; NaN if they are drawn and others are not finite."""
        hidden = self.settings.draws and not finite
        return torch.full_like(values_K, torch.nan) if hidden else values_K

    def due(self, slot: Slot, gradient: Gradient) -> tuple[Tensor, Tensor | None]:
        """Returns the gradient plus the residual: new memory, flat, float32 or float64.

        Returns:
            With momentum correction `v = v + u` and `u = m u + g`, otherwise `v + g` and None.
        """
        memory = self._memories[slot] if self._remembers(slot) else None
        due_N = formed(gradient).flatten()
        velocity_N = None
        if self.settings.momentum:
            before = None if memory is None else memory.velocity_N
            velocity_N = due_N if before is None else due_N + self.settings.momentum * before
            due_N = velocity_N.clone()
        return due_N if memory is None else due_N.add_(memory.residual_N), velocity_N

    def keep(
        self,
        slot: Slot,
        due_N: Tensor,
        velocity_N: Tensor | None,
        picked: Picked,
        arrives_K: Tensor,
    ) -> None:
        """Keeps the unsent part as the residual, and clears the momentum of the sent entries.

        Args:
            slot: The slot.
            due_N: First result of `due`, finite; changed in place.
            velocity_N: Second result of `due`.
            picked: Entries that were sent.
            arrives_K: Values of these entries as receivers decode them.
        """
        if not self._remembers(slot):
            return
        picked.add(arrives_K, due_N, -1)
        if velocity_N is not None:
            velocity_N = picked.cleared(velocity_N)
        self._memories[slot] = _Memory(due_N, velocity_N)

    def keep_loss(self, slot: Slot, lost_K: Tensor, sent: Entries) -> None:
        """Adds to the residual of this step what was lost of entries that this site has merged."""
        if not (self._remembers(slot) and is_finite(lost_K)):
            return
        memory = self._memories.latest(slot) or _Memory(lost_K.new_zeros(slot.numel))
        residual_N = memory.residual_N.clone()
        Picked(sent.places_B, sent.block).add(lost_K.to(residual_N.dtype), residual_N)
        self._memories[slot] = replace(memory, residual_N=residual_N)

    def commit(self, *, applied: bool) -> None:
        """Keeps the step's memories and counts it if it is applied, else discards them."""
        self._memories.commit(applied=applied)
        self.steps += applied
        self._drawn = {}
        self.phase = self.settings.density_at(self.steps)

    def forget(self, weights: Set[str]) -> None:
        """Keeps no residual of these weights in steps that send all of their entries."""
        self._forgotten = weights

    def remembers(self, unit: Unit) -> bool:
        """True if error feedback is on."""
        return self.settings.error_feedback

    def _remembers(self, slot: Slot) -> bool:
        """True if this step keeps the residual of a slot, and its velocity."""
        if slot.weight in self._forgotten and not self.settings.momentum:
            return self.settings.error_feedback and self.count(slot) < slot.numel
        return self.settings.error_feedback

    def _unsent(self, slot: Slot, memory: _Memory) -> Tensor:
        return memory.residual_N.view(slot.groups, slot.outputs, slot.inputs)

    def _added(self, slot: Slot, residual: Gradient) -> _Memory:
        own, whole_N = self._memories[slot], formed(residual).flatten()
        if own is None:
            return _Memory(whole_N)
        return replace(own, residual_N=own.residual_N + whole_N)

    def state(self) -> StateDict:
        """Returns, under "common", what is equal on all sites and, under "own", what is not."""
        return {"common": {"sparse": {"steps": self.steps}}, **super().state()}

    def _saved(self, memory: _Memory) -> StateDict:
        velocity = {} if memory.velocity_N is None else {"unsent_velocity": memory.velocity_N}
        return {**saved_residual(memory.residual_N), **velocity}

    def load(self, inheritance: Inheritance) -> None:
        """Continues from the saved residuals that this site takes over."""
        self.steps, self._drawn = inheritance.first["common"]["sparse"]["steps"], {}
        self.phase = self.settings.density_at(self.steps)
        self._memories.replace(inherited_memories(inheritance, _inherited))

    def reveals(self, unit: Unit) -> str:
        """Returns what other sites learn from the unit, for the coverage table."""
        which = "a few" if self.settings.draws else "its largest"
        return f"this site's gradient, {which} entries"

    def amount(self, unit: Unit) -> str:
        """Returns the density of the next step and the selection, for the coverage table."""
        which = _WHICH[self.settings.select].format(block=self.settings.block)
        return f"{100 * self.settings.density_at(self.steps):.3g}% of the entries, {which}"


def _inherited(parts: Sequence[Saved], weight: float) -> _Memory | None:
    if not any("unsent" in part for part in parts):
        return None
    velocities = [{"unsent": p["unsent_velocity"]} for p in parts if "unsent_velocity" in p]
    residual = inherited_residual(parts, weight)
    velocity = inherited_residual(velocities, weight)
    assert isinstance(residual, Tensor)
    assert not isinstance(velocity, Factors)
    return _Memory(residual, velocity)


class SharedEntries(Sketches):
    """Sketch of random entries common to all sites: one all-reduce of their values."""

    rounds = 1

    def __init__(self, entries: SparseCompressor) -> None:
        self._entries = entries
        self._begun: dict[Slot, Picked] = {}

    def columns(self, slot: Slot) -> int:
        """Returns K."""
        return self._entries.count(slot)

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Returns (K,): one number per entry."""
        return (self.columns(slot),)

    def begin(self, slot: Slot, gradient: Gradient) -> Tensor:
        """Returns this site's values; NaN, for all sites to see, if its gradient is not finite."""
        due_N, velocity_N = self._entries.due(slot, gradient)
        blocks_B = self._entries.drawn(slot, self.columns(slot), due_N.device)
        picked = self._begun[slot] = self._entries.entries.picked(blocks_B, slot.numel)
        finite, values_K = is_finite(due_N), picked.of(due_N)
        if finite:
            ((_, arrives_K),) = written(self._entries.codecs(slot), [values_K], [values_K.dtype])
            self._entries.keep(slot, due_N, velocity_N, picked, arrives_K)
        return self._entries.seen_by_all(values_K, finite=finite)

    def end(self, slot: Slot, z: Tensor, sites: int) -> Entries:
        """Returns the mean over the sites at the places."""
        return self._begun.pop(slot).entries(widened(z) / sites, slot)

    def stands_for(self, slot: Slot, part: Tensor, mean: Arrived) -> Entries:
        """Returns the site's entries at the places that all sites have drawn."""
        assert isinstance(mean, Entries)
        return mean._replace(values_K=widened(part))


class MergedEntries(Merger):
    """Means of entries that all sites have drawn, made by the owner of a layer.

    All sites lack what its encoding loses, but one remembers it: it counts S times, as the mean
    divides by S.
    """

    def __init__(self, entries: SparseCompressor) -> None:
        self._entries = entries

    def merged_rows(self, slot: Slot, rows_S: Sequence[int]) -> int:
        """Returns K, as many as each site sends."""
        return self._entries.count(slot) if any(rows_S) else 0

    def merged_bytes(self, slot: Slot, rows: int) -> int:
        """Returns the bytes of the values."""
        return self._entries.payload_bytes(slot, rows)

    def merge(self, slot: Slot, parts: Sequence[Arrived], rows: int, sites: int) -> Payload:
        """Returns the mean of the values, in the same codecs."""
        entries = [part for part in parts if isinstance(part, Entries)]
        total_K = sum((part.values_K for part in entries[1:]), entries[0].values_K)
        mean_K = widened(total_K) / sites
        ((sent, arrives_K),) = written(self._entries.codecs(slot), [mean_K], [mean_K.dtype])
        self._entries.keep_loss(slot, sites * (mean_K - arrives_K), entries[0])
        return [sent]
