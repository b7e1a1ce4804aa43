"""Sessions over sites of several ranks each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outergrad.capture.changes import Change
from outergrad.capture.engine import NO_TASK
from outergrad.core.errors import ExchangeError
from outergrad.core.types import StateDict
from outergrad.messages.header import Header
from outergrad.record.coverage import Coverage, Travel
from outergrad.record.stats import Stats
from outergrad.session.inspect import Inspection
from outergrad.session.mesh.level_step import LevelStep, SharePlanner
from outergrad.session.mesh.levels import Levels
from outergrad.session.mesh.pooled_step import PooledStep, RankOfSite
from outergrad.session.mesh.pooling import shares
from outergrad.session.reporting import Reporter
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.session.state import resumed
from outergrad.session.stepping import Step
from outergrad.step.carried_over import CarriedOver
from outergrad.step.groups import end_unfinished, on_group
from outergrad.step.header_builder import PLAIN, Announced, HeaderBuilder
from outergrad.step.lost import Findings
from outergrad.step.mishaps import Mishaps

_STATE = "two levels"


class LevelsSession(Session):
    """What a session is whose ranks are those of a mesh."""

    def __init__(
        self, inspection: Inspection, levels: Levels, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, levels.site, fingerprint, settings)
        self._levels, self._several = levels, levels.ranks > 1
        told = (settings.method, inspection.model, inspection.exchanges, inspection.every)
        self._reporter = Reporter(settings.recorders, levels.number, levels.ranks, *told)
        tell = self._reporter.mishap
        self._mishaps = Mishaps(inspection.model.params, levels.number, None, tell)

    # -- what users call ------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """As `Session.state_dict`; every rank of every site saves its own."""
        local = self._levels.local
        return {**super().state_dict(), _STATE: [local.rank, local.world_size]}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """As `Session.load_state_dict`, with the states of this local rank, one or of all sites.

        Raises:
            ValueError: on all ranks, and nothing is changed: also if a state is of another local
                rank, or of sites with another number of ranks.
            RuntimeError: as in `Session.load_state_dict`.
        """
        end_unfinished(self._comm.group)
        self._refuse_lost()
        error = None
        try:
            self._check(state)
        except ValueError as raised:
            error = raised
        lines = ["the state can be loaded"]
        self._levels.agree(lines, error)
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

    def _finish(self, step: Step) -> None:
        if step is not self._step or not isinstance(step, LevelStep):
            super()._finish(step)
            return
        try:
            with self._giving_up():
                step.finish()
            self._unshared.clear()
        finally:
            self._close(step)
        self._run_hooks(step.used if step.applied else ())

    def _tell(self, change: Change) -> None:
        """Gives up the next step together with all other ranks, so that none applies it."""
        watch = self._model_watch()
        assert watch is not None
        end_unfinished(self._comm.group)
        step = self._step = self._unused_step()
        try:
            with self._giving_up(), watch.as_agreed():
                step.abandon()
        finally:
            self._close(step)

    def _unused_step(self) -> LevelStep:
        """A step that this rank has nothing for."""
        raise NotImplementedError

    def _close(self, step: Step) -> None:
        if not isinstance(step, LevelStep):
            super()._close(step)
            return
        self._step = None
        on_group(self._comm.group).running.remove(self)
        for layer in self._layers:
            layer.forget_awaited()
            layer.forget_untapped()
        if not step.ended:
            return
        self._tap_next.update(step.tap_next)
        self._chosen.update(step.reasons)
        shared, number = step.shared, self._stats.step + 1
        none = Stats(number, total_sent_bytes=self._comm.sent_bytes)
        self._stats = none if shared is None else shared.stats(number)
        self._note_end(counted=step.applied)
        if step.applied and shared is not None:
            self._reporter.report(shared.context, self._stats)

    def end_unfinished(self, *, unless: int) -> None:
        """Ends a step whose backward raised here, so that all ranks are in step again."""
        step = self._step
        if not isinstance(step, LevelStep) or step.task == unless:
            return
        try:
            step.abandon()
        except ExchangeError as error:
            self._lost_by(error)
        self._close(step)

    def _give_up(self, error: ExchangeError) -> bool:
        """Between the sites and inside this one: all ranks hear of it."""
        counted = super()._give_up(error)
        self._levels.local.give_up("", "", lambda _: True, 0.0)
        if isinstance(self._step, LevelStep):
            self._step.clear()
        return counted

    def _find_out(self, error: ExchangeError) -> Findings:
        found, step = super()._find_out(error), self._step
        if isinstance(step, LevelStep) and step.shared is not None and step.shared.voted:
            doubt = "this rank's share may have arrived everywhere"
            return replace(found, certain=False, doubt=doubt)
        return found

    def _refuse_make_equal(self) -> None:
        raise RuntimeError(
            "session.make_equal() with mesh=: what the ranks of a site hold is not compared; "
            "distribute the model again, which makes all equal to the first rank's"
        )

    def _refuse_join(self) -> None:
        raise RuntimeError(
            "session.join() with mesh=: the ranks of a site could not run out of batches one by "
            "one; use loops of equal length"
        )


class TwoLevelSession(LevelsSession):
    """A session whose sites are pooled from their ranks before anything travels between them.

    To its counterparts at the other sites every rank is the site, with the rows and gradients of
    all its ranks, for its share of the model.
    """

    def __init__(
        self, inspection: Inspection, levels: Levels, fingerprint: int, settings: Settings
    ) -> None:
        super().__init__(inspection, levels, fingerprint, settings)
        local, model = levels.local, inspection.model
        self._header_builder = HeaderBuilder(model, fingerprint, local, self._blocks)
        parts = shares(model, local.world_size)
        planner = SharePlanner(parts[local.rank], inspection.exchanges, levels.site.world_size)
        self._planner = planner
        self._site = RankOfSite(model, parts, planner, local, levels.site)

    def coverage(self) -> Coverage:
        """How each parameter travels between the sites, why, and by which rank of a site."""
        return Coverage(tuple(map(self._explained, super().coverage())))

    def _explained(self, line: Travel) -> Travel:
        by = [r for r, share in enumerate(self._site.shares) if line.parameter in share.params]
        if not by:
            return line
        ranks = self._levels.local.world_size
        return replace(
            line, why=f"{line.why}; pooled over {ranks} ranks, sent by local rank {by[0]}"
        )

    def _synchronised(self, task: int, used: set[str]) -> PooledStep:
        carried_over, step = self._accumulator.take(used), self._stats.step
        announced = used | carried_over.params
        about = Announced(step, announced, self._unshared, carried_over)
        header = self._header_builder.header(about)
        return self._pooled(task, used, carried_over, header)

    def _unused_step(self) -> PooledStep:
        header = self._header_builder.absent(self._stats.step, PLAIN)
        return self._pooled(NO_TASK, set(), CarriedOver(), header)

    def _pooled(
        self, task: int, used: set[str], carried_over: CarriedOver, header: Header
    ) -> PooledStep:
        step = header.step
        sessions, reading = on_group(self._comm.group), self._reporter.reading(step)
        alone = len(sessions.attached) == 1
        own = (task, self._site, used, carried_over, header)
        pooled = PooledStep(*own, alone=alone, reading=reading)
        sessions.running.append(self)
        return pooled
