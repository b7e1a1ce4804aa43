"""Shared step of a site of several ranks: reduced inside, shared between sites, spread inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outergrad.buckets.bucket import StepContext
from outergrad.commit.ballot import Decision
from outergrad.commit.step_result import StepResult
from outergrad.core.errors import DriftError, ExchangeError, Failure, StepDiscardedError
from outergrad.core.model import Choice
from outergrad.core.reasons import Reason
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, Subjects, Verdict, Vote
from outergrad.record.stats import Stats
from outergrad.session.mesh.pooling import SharePlanner
from outergrad.session.mesh.rank_reports import RankReport, RankStatus
from outergrad.session.mesh.ranks import ranks_named
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.joint import Point
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep
from outergrad.step.step_plan import StepPlan


@dataclass(frozen=True)
class ScatterResult:
    """Result of the shares of all ranks of a site.

    Attributes:
        used: parameters that have a gradient on some rank of some site.
        tap_next: per unit, whether to tap it in the next forward.
        reasons: per unit, how it travelled.
    """

    used: frozenset[str] = frozenset()
    tap_next: Mapping[Unit, bool] = field(default_factory=dict)
    reasons: Mapping[Unit, Reason] = field(default_factory=dict)

    @property
    def choice(self) -> Choice:
        """The result in the form in which a session follows a step's choice."""
        reasons = tuple(self.reasons[unit] for unit in self.tap_next)
        return Choice((), (), tuple(self.tap_next.values()), (), reasons)


class IntraSiteReducer(Protocol):
    """Protocol of the reducer inside a site: pools gradients of its ranks, and spreads the mean."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Parameters whose gradients are reduced, by name."""
        ...

    @property
    def local(self) -> Comm:
        """Transport to the ranks of this site."""
        ...

    @property
    def active(self) -> Sequence[int]:
        """Ranks of the site that have a batch in `session.join()`."""
        ...

    def prepare(self, captured: Captured) -> None:
        """Does the work that may raise on this rank alone, before any message."""
        ...

    def reduce(
        self, spec: StepSpec, captured: Captured, fate: RankStatus
    ) -> tuple[StepSpec, RankStatus]:
        """Pools this rank's share; returns its step with the other sites, and a status.

        The status is the worst that is known here of a rank of the site.
        """
        ...

    def tell(self, ending: RankReport, step: SharedStep | None) -> list[list[int]]:
        """Exchanges the reports on all shares; returns those of all ranks of the site as words."""
        ...

    def spread(self, step: SharedStep) -> ScatterResult:
        """Leaves the mean gradients of all shares on this rank, once the step counts."""
        ...


class MeshStep:
    """Step of a site of several ranks, which reduces inside the site before and after the exchange.

    During backward everything stays on this rank. At its end the gradients of the site are pooled:
    each rank gets those of its share, and makes a shared step with its counterparts at the other
    sites. Then the ranks of the site tell each other how their shares fared: the step counts if all
    shares arrived. Once it has begun, all ranks go through all of its messages, even if the
    backward of one raised.

    Args:
        spec: this rank's step, before anything is pooled.
        inside: reducer of the site.
        planner: of this rank's share.

    Attributes:
        task: as for `SharedStep`.
        captured: as for `SharedStep`.
        choice: how every unit of the model travelled; None before the means are spread.
        decision: whether the step counts; None before that is known.
        subjects: parameters and buffers that the votes on all shares can be about.
        plan: None: its messages to other sites are not all that it does.
    """

    plan: StepPlan | None = None

    def __init__(self, spec: StepSpec, inside: IntraSiteReducer, planner: SharePlanner) -> None:
        self.task, self.captured = spec.task, spec.captured()
        self.choice: Choice | None = None
        self.decision: Decision | None = None
        self.subjects = Subjects(list(spec.model.params), spec.buffers.names)
        self._spec, self._inside, self._planner = spec, inside, planner
        self._between: StepSpec | None = None
        """This rank's share of the step, once it is pooled."""
        self._share: SharedStep | None = None
        """Step of the share, once it has begun."""
        self._spread = ScatterResult()
        self._worst = RankStatus.GOOD
        self._error: Exception | None = None

    @property
    def shared(self) -> MeshStep:
        """The step itself."""
        return self

    @property
    def place(self) -> str:
        """Description, for error messages, of what this site waits for."""
        return "the headers"

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units that the choice is about; none before the means are spread."""
        return tuple(self._spread.tap_next)

    @property
    def context(self) -> StepContext:
        """Context of this rank's share, which has begun."""
        assert self._share is not None
        return self._share.context

    @property
    def drift(self) -> DriftError | None:
        """Error that counterparts have applied different results, if that was found."""
        return None if self._share is None else self._share.drift

    @property
    def applied(self) -> bool:
        """True if the step counts: all shares of all sites arrived."""
        return self.decision is not None and self.decision.good

    @property
    def voted(self) -> bool:
        """True if the other sites may have applied this rank's share."""
        return self._share is not None and self._share.voted

    @property
    def active_here(self) -> Sequence[int]:
        """Ranks of this site that have a batch in a joined loop."""
        return self._inside.active

    def note_gradient(self, name: str) -> None:
        """Notes that a parameter has a gradient besides its factors."""
        self.captured.has_autograd_grad.add(name)

    def note_written(self, name: str) -> None:
        """Notes that a backward wrote to `param.grad` itself."""
        self.captured.has_autograd_grad.add(name)

    def ready_sink(self) -> Callable[[str], object]:
        """Returns what takes names of ready parameters."""
        return self.on_ready

    def on_ready(self, name: str) -> None:
        """Does nothing: nothing is sent before the end of backward."""

    def on_joint(self, point: Point, delta: Tensor) -> Tensor:
        """Returns this rank's own delta: shared parts are refused with `mesh=`."""
        return delta

    def agreed(self) -> Sequence[Header]:
        """Returns the headers of all sites."""
        if self._share is None:
            self._reduce(RankStatus.GOOD)
        return self._begin().agreed()

    def send(self) -> None:
        """Pools, and starts the messages of this rank's share; `finish` receives their results."""
        self._reduce(RankStatus.GOOD)
        if self._worst == RankStatus.GOOD:
            with ranks_named(self._spec.comm):
                self._begin().send()

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the gradients the mean over all ranks.

        Raises:
            StepDiscardedError: some rank raised; what is in `param.grad` is void.
            ExchangeError: some rank of the site is lost, or its counterparts are.
        """
        decision = self._go_through(RankStatus.GOOD)
        if not decision.good:
            self.clear()
        if self._error is not None:
            raise self._error
        if decision.verdict == Verdict.FAILED:
            raise StepDiscardedError(
                f"another rank raised in step {self._spec.header.step}: it must not be applied; "
                f"call optimizer.zero_grad() and go on with the next"
            )
        if decision.verdict >= Verdict.REFUSED:
            raise decision.error(self.subjects, self._spec.blocks, self._spec.comm.sites)

    @torch.no_grad()
    def abandon(self, changed: str | None = None) -> None:
        """Ends a step whose backward raised here, or whose model changed, with all other ranks."""
        self._go_through(RankStatus.FAILED, changed)

    def clear(self) -> None:
        """Drops all gradients of a step that does not count."""
        param_grad.drop(self._inside.params.values())

    def stats(self, step: int) -> Stats:
        """Returns the statistics of this rank's share.

        Args:
            step: number of synchronised steps so far, including this one.
        """
        return self._begin().stats(step)

    def as_plan(self, headers: Sequence[Header], *, rests: bool) -> StepPlan | None:
        """Returns None: every step pools anew before it sends."""
        return None

    def settle(self, decision: Decision) -> None:
        """Ends this rank's share."""
        self._begin().settle(decision)

    def take(self, brought: StepResult) -> None:
        """Applies the result of this rank's share from another site."""
        self._begin().take(brought)

    # -- the way through the step ---------------------------------------------------------------

    def _begin(self) -> SharedStep:
        """Returns the step of this rank's share, which begins here if it has not."""
        if self._share is None:
            assert self._between is not None
            self._share = SharedStep(self._between)
        return self._share

    def _go_through(self, fate: RankStatus, changed: str | None = None) -> Decision:
        """Goes through the whole step; errors name no sites, as the ranks of one are none."""
        try:
            if self._between is None:
                self._reduce(fate)
            return self._conclude(self._ended(self._exchange(max(fate, self._worst), changed)))
        except ExchangeError as error:
            told = ExchangeError(str(error), kind=error.kind)
            told.ranks, told.waited_s = error.ranks, error.waited_s
            raise told from error

    def _reduce(self, fate: RankStatus) -> None:
        """Pools the gradients inside the site, at the ranks whose shares they are."""
        if fate == RankStatus.GOOD:
            try:
                self._spec.refuse_leftover()
                self._inside.prepare(self.captured)
            except Exception as error:
                fate, self._error = RankStatus.FAILED, error
        with ranks_named(self._inside.local):
            self._between, self._worst = self._inside.reduce(self._spec, self.captured, fate)
        self.captured.release()

    def _exchange(self, fate: RankStatus, changed: str | None) -> RankStatus:
        """Goes through the step of the share with this rank's counterparts at the other sites."""
        try:
            with ranks_named(self._spec.comm):
                if fate == RankStatus.GOOD:
                    self._begin().finish()
                else:
                    self._begin().abandon(changed)
        except StepDiscardedError:
            fate = RankStatus.FAILED
        except ExchangeError as error:
            fate, self._error = RankStatus.LOST, error
        except Exception as error:
            fate, self._error = RankStatus.FAILED, error
        counts = self._share is not None and self._share.applied
        return fate if counts or fate != RankStatus.GOOD else RankStatus.FAILED

    def _ended(self, fate: RankStatus) -> RankReport:
        """Returns the report on the share; its decision is about parameters of the share alone."""
        share = self._share
        decision = None if share is None else share.decision
        if fate == RankStatus.GOOD:
            return RankReport(fate, Verdict.GOOD, self._spec.comm.rank)
        if share is None or decision is None or decision.good:
            return RankReport(fate, Verdict.FAILED, self._spec.comm.rank)
        vote, own = decision.vote, share.subjects.names
        param = NOTHING if vote.param == NOTHING else self.subjects.names.index(own[vote.param])
        return RankReport(fate, decision.verdict, vote.rank, param)

    def _lost_share(self, rank: int) -> ExchangeError:
        own = self._error
        if not isinstance(own, ExchangeError):
            told = f"local rank {rank} of this site lost its counterparts at the other sites"
            return ExchangeError(told, kind=Failure.CLOSED)  # that rank names them
        error = ExchangeError(str(own), kind=own.kind)
        error.ranks, error.waited_s = own.ranks, own.waited_s
        return error

    def _conclude(self, own: RankReport) -> Decision:
        """Spreads the means if all shares arrived; raises ExchangeError if a rank is lost."""
        counts = len(self.subjects.names), self._spec.comm.world_size
        with ranks_named(self._inside.local):
            told = enumerate(self._inside.tell(own, self._share))
        endings = [RankReport.parse(words, rank, *counts) for rank, words in told]
        fates = [ending.fate for ending in endings]
        worst = max(fates)
        self._planner.conclude(applied=worst == RankStatus.GOOD)
        if worst == RankStatus.LOST:
            raise self._lost_share(fates.index(worst))
        if worst == RankStatus.GOOD:
            with ranks_named(self._inside.local):
                self._spread = self._inside.spread(self._begin())
        self.choice, self.context.used = self._spread.choice, self._spread.used
        said = max(endings, key=lambda ending: ending.verdict)  # the first of the worst
        header = self._spec.header
        vote = Vote(header.fingerprint, header.step, said.site, said.verdict, said.param)
        self.decision = Decision(said.verdict, vote)
        return self.decision
