"""Sessions over sites of several ranks each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from outergrad.core.errors import ExchangeError
from outergrad.core.model import Model
from outergrad.core.types import StateDict
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.inspect import Inspection
from outergrad.session.made_equal import ReplicaState
from outergrad.session.mesh.levels import Levels
from outergrad.session.mesh.mesh_step import Inside, MeshStep
from outergrad.session.mesh.pooled import Pooled
from outergrad.session.mesh.pooling import shares
from outergrad.session.mesh.ranks import ranks_named
from outergrad.session.mesh.share_planner import SharePlanner
from outergrad.session.reporting import Reporter
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.session.state import resumed
from outergrad.step.cadence import Cadence, Share
from outergrad.step.groups import end_unfinished
from outergrad.step.mishaps import Mishaps
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep

_STATE = "two levels"


class MeshSession(Session):
    """Session over sites of several ranks, whose gradients are pooled before they leave the site.

    To its counterparts at the other sites every rank stands for its site, with the rows and
    gradients of all ranks of the site, for its share of the model.
    """

    def __init__(
        self,
        inspection: Inspection,
        levels: Levels,
        fingerprint: int,
        settings: Settings,
        *more: Any,
    ) -> None:
        super().__init__(inspection, levels.site, fingerprint, settings, *more)
        self._levels = levels
        self._several = levels.ranks > 1 or settings.transform is not None
        model, compressors, every = self._model, inspection.compressors, inspection.every
        self._parts = self._shares()
        own = (self._parts, levels.local.rank, compressors, levels.site.cost)
        self._planner = SharePlanner(*own, own=inspection.local.keys())
        whole = Share(model, self._planner, self._header_builder)
        self._cadence = Cadence(whole, every, self._accumulator)
        told = (settings.recorders, levels.number, levels.ranks, settings.method)
        self._reporter = Reporter(*told, model, compressors, every)
        about = levels.number, settings.max_bad_steps, self._reporter.mishap
        self._mishaps = Mishaps(model.params, *about)

    def _shares(self) -> Sequence[Model]:
        """Returns per rank of a site the share that it takes to the other sites."""
        whole = self._transform is not None and self._transform.needs_all_layers
        return shares(self._model, self._levels.local.world_size, whole=whole)

    _last_here = 0
    """Local rank that was active last in `session.join()`."""

    # -- public ---------------------------------------------------------------------------------

    def coverage(self) -> Coverage:
        """Returns how each parameter travels between the sites, why, and by which local rank."""
        return Coverage(tuple(map(self._with_sender, super().coverage())))

    def _with_sender(self, line: Travel) -> Travel:
        by = [r for r, share in enumerate(self._parts) if line.parameter in share.params]
        if not by:
            return line
        ranks = self._levels.local.world_size
        if line.parameter in self._local:
            return replace(line, why=f"{line.why}: the mean over its {ranks} ranks")
        why = f"{line.why}; pooled over {ranks} ranks, sent by local rank {by[0]}"
        return replace(line, why=why)

    def state_dict(self) -> StateDict:
        """Returns the state of this rank, as `Session.state_dict`; every rank saves its own."""
        local = self._levels.local
        return {**super().state_dict(), _STATE: [local.rank, local.world_size]}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from saved states, as `Session.load_state_dict`.

        Takes the state of this rank, or a list of the states of this local rank at all sites.

        Raises:
            ValueError: on all ranks, and nothing is changed: also if a state is of another local
                rank, or of sites with another number of ranks.
            RuntimeError: as in `Session.load_state_dict`.
        """
        end_unfinished(self._comm.key)
        self._refuse_lost()
        error = None
        try:
            self._check(state)
        except ValueError as raised:
            error = raised
        lines = ["the state can be loaded"]
        self._levels.agree(lines, error)
        # This compares counterparts alone: the other ranks of a site hear of an error below.
        try:
            resumed(state, self._owner, self._comm)
        except ValueError as raised:
            error = raised
        self._levels.agree(lines, error)
        super().load_state_dict(state)

    def _check(self, state: StateDict | Sequence[StateDict]) -> None:
        local = self._levels.local
        own = [local.rank, local.world_size]
        for one in [state] if isinstance(state, dict) else state:
            if one.get(_STATE) != own:
                raise ValueError(
                    f"the state is of local rank and number of local ranks {one.get(_STATE)}, this "
                    f"is {own}: load what this rank's counterparts saved, on as many per site"
                )

    # -- steps ------------------------------------------------------------------------------------

    def _step_of_spec(self, spec: StepSpec) -> MeshStep:
        assert isinstance(spec.planner, SharePlanner)
        return MeshStep(spec, self._inside(spec.planner, spec.model), spec.planner)

    def _pattern_of(self, step: SharedStep) -> None:
        """Never repeats a step, which has messages inside the site, too."""

    def _inside(self, planner: SharePlanner, model: Model) -> Inside:
        return Pooled(model, planner, self._levels.local, self._transform)

    def _give_up(self, error: ExchangeError) -> bool:
        counted = super()._give_up(error)
        if isinstance(self._step, MeshStep):
            self._step.clear()
        return counted

    def _has_voted(self) -> bool:
        return isinstance(self._step, MeshStep) and self._step.share_voted

    def _refuse_make_equal(self) -> None:
        raise RuntimeError(
            "session.make_equal() with mesh=: what the ranks of a site hold is not compared; "
            "distribute the model again, which makes all equal to the first rank's"
        )

    # -- session.join() ---------------------------------------------------------------------------

    def _finish(self, step: Any) -> None:
        super()._finish(step)
        if isinstance(step, MeshStep) and isinstance(step.inside, Pooled) and step.inside.active:
            self._last_here = step.inside.active[0]

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield (
            bool(self._local),
            "with mesh= the og.Local() parts of a site would be made equal to those of others: use "
            "loops of equal length",
        )
        yield from super()._objections()

    def _make_replicas_equal(self, replica: ReplicaState) -> None:
        """Makes ranks equal inside sites first: all then take those of the last active site."""
        with ranks_named(self._levels.local):
            replica.make_equal(self._levels.local, self._last_here)
        super()._make_replicas_equal(replica)
