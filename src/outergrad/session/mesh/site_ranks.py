"""Sites of several ranks, whose gradients come together before they travel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from outergrad.capture.changes import Change, ModelWatch
from outergrad.capture.claims import HeldHooks, HookedClaim
from outergrad.capture.parameters import WatchedParameter
from outergrad.comm.words import words_of_all
from outergrad.core.model import Model
from outergrad.core.transform import GradientTransform
from outergrad.core.types import StateDict
from outergrad.messages.raw import from_raw, raw
from outergrad.planning.plan import Planner
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.drift import LANE, Drift, compared
from outergrad.session.inspect import Inspection
from outergrad.session.loop import BackwardLoop
from outergrad.session.made_equal import ReplicaState
from outergrad.session.mesh.levels import Levels
from outergrad.session.mesh.mesh_step import IntraSiteReducer, MeshStep
from outergrad.session.mesh.pooled import Pooled
from outergrad.session.mesh.pooling import LEAST_BYTES, SharePlanner, shares
from outergrad.session.mesh.ranks import ranks_named
from outergrad.session.mesh.shards import Sharded, Shards
from outergrad.session.model_guard import ModelGuard
from outergrad.session.ranks import OneRank
from outergrad.session.reporting import Reporter
from outergrad.session.running_step import SyncedStep
from outergrad.session.state import Owner, resumed
from outergrad.step.spec import StepSpec

_STATE = "two levels"


class PooledRanks(OneRank):
    """Ranks whose rows and gradients are pooled before anything travels between sites.

    To its counterparts at the other sites every rank is the site, with the rows and gradients of
    all its ranks, for its share of the model.

    Args:
        levels: transports between the sites and inside this one.
        transform: changes the site's gradient before it is sent; None without one.
        always: as for `OneRank`.
    """

    def __init__(
        self, levels: Levels, transform: GradientTransform | None, *, always: bool = False
    ) -> None:
        super().__init__(levels.site, levels.number, levels.ranks, always=always)
        self._levels, self._transform = levels, transform
        self._parts: Sequence[Model] = ()
        self._local: Set[str] = frozenset()
        self._last_active = 0
        """Rank of this site that was active last in `session.join()`."""

    def report(self, reporter: Reporter) -> None:
        """Reports nothing of the sites' names, which are of ranks here."""

    # -- steps ----------------------------------------------------------------------------------

    def planner(self, inspection: Inspection, whole: Planner) -> SharePlanner:
        """Returns the planner of this rank's share of the model."""
        self._parts, self._local = self._shares(inspection.model), inspection.local.keys()
        rank, cost = self._levels.local.rank, self._levels.site.cost
        return SharePlanner(self._parts, rank, inspection.compressors, cost, own=self._local)

    def _shares(self, model: Model) -> Sequence[Model]:
        """Returns what each rank of a site takes to the other sites."""
        whole = self._transform is not None and self._transform.needs_all_layers
        return shares(model, self._levels.local.world_size, whole=whole)

    def step(self, spec: StepSpec, unshared: Set[str]) -> MeshStep:
        """Begins a step inside the site, with the other sites, and inside again."""
        assert isinstance(spec.planner, SharePlanner)
        return MeshStep(spec, self._inside(spec.planner, spec.model), spec.planner)

    def _inside(self, planner: SharePlanner, model: Model) -> IntraSiteReducer:
        return Pooled(model, planner, self._levels.local, self._transform)

    def unsent(
        self, own: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
    ) -> Mapping[str, Tensor]:
        """Returns what the ranks of this site have not sent, each of its share, by name."""
        local, found = self._levels.local, dict[str, Tensor]()
        with ranks_named(local):
            flags_R = words_of_all(local, [name in own for name in params])
            held_R = [list(compress(params, flags)) for flags in flags_R]
            sizes_R = [[params[name].nbytes for name in names] for names in held_R]
            message = [torch.zeros(LEAST_BYTES, dtype=torch.uint8)]  # no message may be empty
            message += [raw(own[name]) for name in held_R[local.rank]]
            ours = torch.cat([part.to(local.device) for part in message])
            counts = [LEAST_BYTES + sum(sizes) for sizes in sizes_R]
            parts_R = local.all_gather(ours, counts).wait()
        for names, sizes, part in zip(held_R, sizes_R, parts_R, strict=True):
            for name, content in zip(names, part[LEAST_BYTES:].split(sizes), strict=True):
                p = params[name]  # the transport may have another device
                found[name] = from_raw(content, p.dtype, p.shape).to(p.device)
        return found

    def note(self, step: SyncedStep) -> None:
        """Notes which ranks still had a batch."""
        if step.active_here:
            self._last_active = step.active_here[0]

    # -- what users see -------------------------------------------------------------------------

    def explained(self, lines: Coverage) -> Coverage:
        """Adds which rank of a site sends each parameter."""
        return Coverage(tuple(map(self._with_sender, lines)))

    def _with_sender(self, line: Travel) -> Travel:
        by = [r for r, share in enumerate(self._parts) if line.parameter in share.params]
        if not by:
            return line
        ranks = self._levels.local.world_size
        if line.parameter in self._local:
            return replace(line, why=f"{line.why}: the mean over its {ranks} ranks")
        why = f"{line.why}; pooled over {ranks} ranks, sent by local rank {by[0]}"
        return replace(line, why=why)

    def state(self) -> StateDict:
        """Returns this rank's place in its site."""
        local = self._levels.local
        return {_STATE: [local.rank, local.world_size]}

    def refuse_state(self, state: StateDict | Sequence[StateDict], owner: Owner) -> None:
        """Raises on all ranks of all sites if one cannot load its state.

        Raises:
            ValueError: a state is of another local rank, or of sites with another number of ranks,
                or does not fit the session.
        """
        error = None
        try:
            self._check(state)
        except ValueError as raised:
            error = raised
        lines = ["the state can be loaded"]
        self._levels.agree(lines, error)
        try:
            resumed(state, owner, self._levels.site)
        except ValueError as raised:
            error = raised
        self._levels.agree(lines, error)

    def _check(self, state: StateDict | Sequence[StateDict]) -> None:
        local = self._levels.local
        own = [local.rank, local.world_size]
        for one in [state] if isinstance(state, dict) else state:
            if one.get(_STATE) != own:
                raise ValueError(
                    f"the state is of local rank and number of local ranks {one.get(_STATE)}, this "
                    f"is {own}: load what this rank's counterparts saved, on as many per site"
                )

    def objections(self) -> Iterator[tuple[bool, str]]:
        """Refuses joined loops of a model with parts that are each site's own."""
        yield (
            bool(self._local),
            "with mesh= the og.Local() parts of a site would be made equal to those of others: use "
            "loops of equal length",
        )

    def make_equal(self, replica: ReplicaState) -> None:
        """Makes the ranks of the site equal: one of them was active last."""
        with ranks_named(self._levels.local):
            replica.make_equal(self._levels.local, self._last_active)

    def compared(self, tensors: Mapping[str, Tensor | None]) -> Drift | None:
        """Compares tensors over all ranks of all sites; None if they are equal."""
        levels = self._levels
        return compared(partial(levels.words_of_all, lane=LANE), tensors, self._alike, _ranks)

    @property
    def _alike(self) -> Sequence[Sequence[int]]:
        """Ranks of all sites whose tensors should be equal, in groups."""
        return [range(self.count)]

    def make_all_equal(self, replica: ReplicaState) -> bool:
        """Makes every replica that of the first rank; returns whether two differed."""
        with ranks_named(self._levels.local):
            inside = replica.make_equal(self._levels.local, 0)
        between = replica.make_equal(self._levels.site, 0)
        return any(differed for (differed,) in self._levels.words_of_all([inside or between]))


class ShardGuard(ModelGuard):
    """Looks for changes of a model of FSDP2, which has its own tensors in it during a backward.

    Args:
        watched: the trained parameters, by name.
        frozen: the frozen ones, as FSDP2 has them.
    """

    def __init__(
        self, watched: Mapping[str, WatchedParameter], frozen: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(watched, follows_nodes=False)
        self._frozen = frozen

    def at_begin(self, used: Set[str]) -> Change | None:
        """Refuses parameters that were frozen and are trained now.

        Raises:
            RuntimeError: names the first one.
        """
        name = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if name is not None:
            raise RuntimeError(
                f"{name!r} was frozen when the model was distributed and would not be shared: "
                f"call session.detach() and og.distribute(model, ...) again on every rank"
            )
        return None


class ShardedRanks(PooledRanks):
    """Ranks that each hold shards of the model (FSDP2) and share them with their counterparts.

    FSDP2 calls the hooks of sharded parameters once it has reduced their gradients. At the end of
    backward, after FSDP2's own end, the mean over the sites is formed.

    Args:
        levels: transports between the sites and inside this one.
        transform: changes the site's gradient before it is sent; None without one.
        shards: this rank's shards.
        inspection: of the model.
        changes: True if changes of the weights are shared, and no gradients.
    """

    watches_backwards = False
    remedy = (
        "call session.detach() and og.distribute again, which makes the shards equal to the first "
        "site's, and load the optimizers"
    )

    def __init__(
        self,
        levels: Levels,
        transform: GradientTransform | None,
        shards: Shards,
        inspection: Inspection,
        *,
        changes: bool = False,
    ) -> None:
        super().__init__(levels, transform, always=True)
        self._shards, self._changes = shards, changes
        self._trained = {name: shards.params[name] for name in inspection.model.params}
        self._frozen = {name: shards.params[name] for name in inspection.frozen}
        # Hooks of others are looked for at the nodes of now, which would go if nobody held them.
        self._nodes = [get_gradient_edge(p).node for p in self._trained.values()]
        self._claims: dict[str, HookedClaim] = {}

    def attach(self, loop: BackwardLoop) -> None:
        """Hooks the shards, which FSDP2 tells when it has reduced a gradient."""
        if self._changes:
            return
        self._claims = {
            name: HookedClaim(p, loop, partial(loop.on_shard, name))
            for name, p in self._trained.items()
        }

    def detach(self) -> None:
        """Removes the hooks; FSDP2 goes on inside the site."""
        for claim in self._claims.values():
            claim.remove()

    def guard(self, watched: Mapping[str, WatchedParameter], *, follows_nodes: bool) -> ShardGuard:
        """Returns what finds changes of the model."""
        return ShardGuard(watched, self._frozen)

    def watch(self, loop: BackwardLoop, model: nn.Module, watch: ModelWatch) -> None:
        """Looks at the model before steps of optimizers: else FSDP2 has its own tensors in it."""
        loop.guard.keep(watch)

    def hooks(self, watched: Mapping[str, WatchedParameter]) -> Mapping[str, HeldHooks]:
        """Returns the held hooks of every shard, by name."""
        return {name: claim.hooks for name, claim in self._claims.items()}

    def begin(self) -> None:
        """Holds the hooks of others until the mean over the sites is there."""
        for claim in self._claims.values():
            claim.hooks.hold()

    def step(self, spec: StepSpec, unshared: Set[str]) -> MeshStep:
        """Begins a step; FSDP2 tells which shards it uses only as it reduces them."""
        return super().step(replace(spec, used={*spec.used, *unshared}), unshared)

    def unsent(
        self, own: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
    ) -> Mapping[str, Tensor]:
        """Returns what this rank has not sent of its own shards."""
        return own

    def explained(self, lines: Coverage) -> Coverage:
        """Adds nothing: every rank sends its own shards."""
        return lines

    def objections(self) -> Iterator[tuple[bool, str]]:
        """Refuses joined loops."""
        yield (
            True,
            "the forward of a model of fully_shard() waits for all ranks of its site, also for "
            "those that have run out: use loops of equal length",
        )

    def refuse_make_equal(self) -> None:
        """Refuses `session.make_equal()`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"session.make_equal() of a model of fully_shard(): states of its optimizers are "
            f"DTensors of FSDP2, which are not compared; {self.remedy}"
        )

    @property
    def _alike(self) -> Sequence[Sequence[int]]:
        """Each rank with its counterparts, which have the same shards."""
        ranks = self._levels.local.world_size
        return [range(local, self.count, ranks) for local in range(ranks)]

    def _shares(self, model: Model) -> Sequence[Model]:
        return [model] * self._levels.local.world_size

    def _inside(self, planner: SharePlanner, model: Model) -> Sharded:
        return Sharded(None if self._changes else self._shards, model, self._levels.local)


def _ranks(numbers: Sequence[int]) -> str:
    """Formats ranks of a mesh as words."""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
