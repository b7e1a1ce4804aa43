"""Shared step of a site of several ranks: reduced inside, shared between sites, spread inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outergrad.commit.ballot import Decision
from outergrad.core.errors import ExchangeError, Failure, StepDiscardedError
from outergrad.core.model import Choice
from outergrad.core.reasons import Reason
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, Subjects, Verdict, Vote
from outergrad.session.mesh.pooling import SharePlanner
from outergrad.session.mesh.rank_reports import RankReport, RankStatus
from outergrad.session.mesh.ranks import ranks_named
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep


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

    def tell(self, ending: RankReport, step: MeshStep) -> list[list[int]]:
        """Exchanges the reports on all shares; returns those of all ranks of the site as words."""
        ...

    def spread(self, step: MeshStep) -> ScatterResult:
        """Leaves the mean gradients of all shares on this rank, once the step counts."""
        ...


class MeshStep(SharedStep):
    """Shared step of a site of several ranks: an ordinary step for this rank's share of the model.

    During backward everything stays on this rank. At its end the gradients of the site are pooled:
    each rank gets those of its share, and begins an ordinary step with its counterparts at the
    other sites. Then the ranks of the site tell each other how their shares fared: the step counts
    if all shares arrived. Once it has begun, all ranks go through all of its messages, even if the
    backward of one raised.

    Args:
        spec: this rank's step, before anything is pooled.
        inside: reducer of the site.
        planner: of this rank's share.
    """

    def __init__(self, spec: StepSpec, inside: IntraSiteReducer, planner: SharePlanner) -> None:
        self.task, self.captured = spec.task, spec.captured()
        self.choice: Choice | None = None
        self.decision: Decision | None = None
        self._spec, self.inside, self._shares = spec, inside, planner
        self._own: StepSpec | None = None
        self._worst = RankStatus.GOOD
        self._error: Exception | None = None
        self._begun = False
        self._spread: ScatterResult | None = None

    @property
    def place(self) -> str:
        """Description, for error messages, of what this site waits for."""
        return "the headers"

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units that the choice is about; none before the shares are spread."""
        return () if self._spread is None else tuple(self._spread.tap_next)

    @property
    def voted(self) -> bool:
        """True if the other sites may have applied this rank's share."""
        return self._begun and self._ballot.is_good

    @property
    def active_here(self) -> Sequence[int]:
        """Ranks of this site that have a batch in a joined loop."""
        return self.inside.active

    def on_ready(self, name: str) -> None:
        """Does nothing: nothing is sent before the end of backward."""

    def agreed(self) -> Sequence[Header]:
        """Returns the headers of all sites."""
        if not self._begun:
            self._reduce(RankStatus.GOOD)
            self._begin()
        return super().agreed()

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
            raise decision.error(self.subjects, self._spec.blocks)

    @torch.no_grad()
    def abandon(self, changed: str | None = None) -> None:
        """Ends a step whose backward raised here, or whose model changed, with all other ranks."""
        self._go_through(RankStatus.FAILED, changed)

    def clear(self) -> None:
        """Drops all gradients of a step that does not count."""
        param_grad.drop(self.inside.params.values())

    def _go_through(self, fate: RankStatus, changed: str | None = None) -> Decision:
        """Goes through the whole step; errors name no sites, as the ranks of one are none."""
        try:
            if self._own is None:
                self._reduce(fate)
            return self._conclude(self._ended(self._share(max(fate, self._worst), changed)))
        except ExchangeError as error:
            told = ExchangeError(str(error), kind=error.kind)
            told.ranks, told.waited_s = error.ranks, error.waited_s
            raise told from error
        finally:
            if self._spread is None:  # no rank knows by itself whether the step counts
                self.choice = self.decision = None

    def _reduce(self, fate: RankStatus) -> None:
        """Pools the gradients inside the site, at the ranks whose shares they are."""
        if fate == RankStatus.GOOD:
            try:
                self._spec.refuse_leftover()
                self.inside.prepare(self.captured)
            except Exception as error:
                fate, self._error = RankStatus.FAILED, error
        with ranks_named(self.inside.local):
            self._own, self._worst = self.inside.reduce(self._spec, self.captured, fate)

    def _begin(self) -> None:
        assert self._own is not None
        super().__init__(self._own)
        self._begun = True

    def _share(self, fate: RankStatus, changed: str | None) -> RankStatus:
        """Goes through the step with this rank's counterparts at the other sites."""
        try:
            with ranks_named(self._spec.comm):
                if not self._begun:
                    self._begin()
                if fate == RankStatus.GOOD:
                    super().finish()
                else:
                    super().abandon(changed)
        except StepDiscardedError:
            fate = RankStatus.FAILED
        except ExchangeError as error:
            fate, self._error = RankStatus.LOST, error
        except Exception as error:
            fate, self._error = RankStatus.FAILED, error
        return fate if self.applied or fate != RankStatus.GOOD else RankStatus.FAILED

    def _ended(self, fate: RankStatus) -> RankReport:
        if fate == RankStatus.GOOD:
            return RankReport(fate, Verdict.GOOD, self._spec.comm.rank)
        if self.decision is None or self.decision.good:
            return RankReport(fate, Verdict.FAILED, self._spec.comm.rank)
        vote, own = self.decision.vote, self.subjects.names
        names = self.all_subjects.names
        param = NOTHING if vote.param == NOTHING else names.index(own[vote.param])
        return RankReport(fate, self.decision.verdict, vote.rank, param)

    def _lost_share(self, rank: int) -> ExchangeError:
        own = self._error
        if not isinstance(own, ExchangeError):
            told = f"local rank {rank} of this site lost its counterparts at the other sites"
            return ExchangeError(told, kind=Failure.CLOSED)  # that rank names them
        error = ExchangeError(str(own), kind=own.kind)
        error.ranks, error.waited_s = own.ranks, own.waited_s
        return error

    @property
    def all_subjects(self) -> Subjects:
        """Parameters and buffers that the votes on all shares can be about."""
        return Subjects(list(self._spec.model.params), self._spec.buffers.names)

    def _conclude(self, own: RankReport) -> Decision:
        """Spreads the means if all shares arrived; raises ExchangeError if a rank is lost."""
        counts = len(self.all_subjects.names), self._spec.comm.world_size
        with ranks_named(self.inside.local):
            told = enumerate(self.inside.tell(own, self))
        endings = [RankReport.parse(words, rank, *counts) for rank, words in told]
        fates = [ending.fate for ending in endings]
        worst = max(fates)
        self._shares.conclude(applied=worst == RankStatus.GOOD)
        if worst == RankStatus.LOST:
            raise self._lost_share(fates.index(worst))
        with ranks_named(self.inside.local):
            spread = self._spread = (
                self.inside.spread(self) if worst == RankStatus.GOOD else ScatterResult()
            )
        self.choice, self.context.used = spread.choice, spread.used
        said = max(endings, key=lambda ending: ending.verdict)  # the first of the worst
        header, self.subjects = self._spec.header, self.all_subjects
        vote = Vote(header.fingerprint, header.step, said.site, said.verdict, said.param)
        self.decision = Decision(said.verdict, vote)
        return self.decision
