"""A step of a site of several ranks: inside the site, with the other sites, inside again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outergrad.core.errors import ExchangeError, Failure, StepDiscardedError
from outergrad.core.model import Choice
from outergrad.core.reasons import Reason
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header
from outergrad.messages.vote import NOTHING, Subjects, Verdict, Vote
from outergrad.session.mesh.rank_reports import Ending, Fate
from outergrad.session.mesh.ranks import ranks_named
from outergrad.session.mesh.share_planner import SharePlanner
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.decision import Decision
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep


@dataclass(frozen=True)
class Spread:
    """What came of the shares of all ranks of a site.

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
        """What a session goes by."""
        reasons = tuple(self.reasons[unit] for unit in self.tap_next)
        return Choice((), (), tuple(self.tap_next.values()), (), reasons)


class Inside(Protocol):
    """How the gradients of a site's ranks come together, and how the mean gets to all of them."""

    @property
    def params(self) -> Mapping[str, Any]:
        """Whose gradients they are."""
        ...

    @property
    def local(self) -> Comm:
        """To the ranks of this site."""
        ...

    def prepare(self, captured: Captured) -> None:
        """Does what may raise on this rank alone."""
        ...

    def reduce(self, spec: StepSpec, captured: Captured, fate: Fate) -> tuple[StepSpec, Fate]:
        """What this rank takes to the other sites, and the worst fate of a rank of its site."""
        ...

    def tell(self, ending: Ending, step: MeshStep) -> list[list[int]]:
        """The words of the endings of all ranks of the site."""
        ...

    def spread(self, step: MeshStep) -> Spread:
        """Leaves the mean gradients of all shares on this rank: they count."""
        ...


class MeshStep(SharedStep):
    """An ordinary step with this rank's counterparts, of what its site has of this rank's share.

    During backward everything stays on this rank. At its end the gradients of the site come to the
    ranks whose shares they are; there the ordinary step begins. When it is over, the ranks of the
    site tell each other what came of it: it counts if all shares arrived. Once begun, all ranks go
    through all of its messages, even if the backward of one raised.

    Args:
        spec: what this rank has.
        inside: of its site.
        planner: of its share.

    Attributes:
        inside: of its site.
    """

    def __init__(self, spec: StepSpec, inside: Inside, planner: SharePlanner) -> None:
        self.task, self.captured = spec.task, spec.captured()
        self.choice: Choice | None = None
        self.decision: Decision | None = None
        self._spec, self.inside, self._shares = spec, inside, planner
        self._own: StepSpec | None = None
        self._worst = Fate.GOOD
        self._error: Exception | None = None
        self._begun = False
        self._spread: Spread | None = None

    @property
    def place(self) -> str:
        """What this site waits for, in words."""
        return "the headers"

    @property
    def units(self) -> tuple[Unit, ...]:
        """What its choice is about."""
        return () if self._spread is None else tuple(self._spread.tap_next)

    @property
    def voted(self) -> bool:
        """Never: what has become of the other shares, no vote says."""
        return False

    @property
    def share_voted(self) -> bool:
        """Whether the other sites may have applied this rank's share."""
        return self._begun and self._ballot.is_good

    def on_ready(self, name: str) -> None:
        """Nothing is sent before the end of backward."""

    def agreed(self) -> Sequence[Header]:
        """The headers of all sites."""
        if not self._begun:
            self._reduce(Fate.GOOD)
            self._begin()
        return super().agreed()

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the gradients the mean over all ranks.

        Raises:
            StepDiscardedError: some rank raised; what is in `param.grad` is void.
            ExchangeError: some rank of the site is lost, or its counterparts are.
        """
        decision = self._go_through(Fate.GOOD)
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
        self._go_through(Fate.FAILED, changed)

    def clear(self) -> None:
        """The step does not count: there are to be no gradients that could be applied."""
        param_grad.drop(self.inside.params.values())

    def _go_through(self, fate: Fate, changed: str | None = None) -> Decision:
        """Ranks of a site are no sites: an error inside one names none."""
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

    def _reduce(self, fate: Fate) -> None:
        """Inside the site: to the ranks whose share it is."""
        if fate == Fate.GOOD:
            try:
                self._spec.refuse_leftover()
                self.inside.prepare(self.captured)
            except Exception as error:
                fate, self._error = Fate.FAILED, error
        with ranks_named(self.inside.local):
            self._own, self._worst = self.inside.reduce(self._spec, self.captured, fate)

    def _begin(self) -> None:
        assert self._own is not None
        super().__init__(self._own)
        self._begun = True

    def _share(self, fate: Fate, changed: str | None) -> Fate:
        """Between the sites: goes through the step with this rank's counterparts."""
        try:
            with ranks_named(self._spec.comm):
                if not self._begun:
                    self._begin()
                if fate == Fate.GOOD:
                    super().finish()
                else:
                    super().abandon(changed)
        except StepDiscardedError:
            fate = Fate.FAILED
        except ExchangeError as error:
            fate, self._error = Fate.LOST, error
        except Exception as error:
            fate, self._error = Fate.FAILED, error
        return fate if self.applied or fate != Fate.GOOD else Fate.FAILED

    def _ended(self, fate: Fate) -> Ending:
        """What has become of this rank's share."""
        if fate == Fate.GOOD:
            return Ending(fate, Verdict.GOOD, self._spec.comm.rank)
        if self.decision is None or self.decision.good:
            return Ending(fate, Verdict.FAILED, self._spec.comm.rank)
        vote, own = self.decision.vote, self.subjects.names
        names = self.all_subjects.names
        param = NOTHING if vote.param == NOTHING else names.index(own[vote.param])
        return Ending(fate, self.decision.verdict, vote.rank, param)

    def _lost_share(self, rank: int) -> ExchangeError:
        """The share of a rank of this site could not reach the other sites."""
        own = self._error
        if not isinstance(own, ExchangeError):
            told = f"local rank {rank} of this site lost its counterparts at the other sites"
            return ExchangeError(told, kind=Failure.CLOSED)  # that rank says which
        error = ExchangeError(str(own), kind=own.kind)
        error.ranks, error.waited_s = own.ranks, own.waited_s
        return error

    @property
    def all_subjects(self) -> Subjects:
        """What the votes on all shares can be about."""
        return Subjects(list(self._spec.model.params), self._spec.buffers.names)

    def _conclude(self, own: Ending) -> Decision:
        """Inside the site: what came of all shares, and their mean gradients if they count.

        Raises:
            ExchangeError: some rank is lost.
        """
        counts = len(self.all_subjects.names), self._spec.comm.world_size
        with ranks_named(self.inside.local):
            told = enumerate(self.inside.tell(own, self))
        endings = [Ending.parse(words, rank, *counts) for rank, words in told]
        fates = [ending.fate for ending in endings]
        worst = max(fates)
        self._shares.conclude(applied=worst == Fate.GOOD)
        if worst == Fate.LOST:
            raise self._lost_share(fates.index(worst))
        with ranks_named(self.inside.local):
            spread = self._spread = self.inside.spread(self) if worst == Fate.GOOD else Spread()
        self.choice, self.context.used = spread.choice, spread.used
        said = max(endings, key=lambda ending: ending.verdict)  # the first of these
        header, self.subjects = self._spec.header, self.all_subjects
        vote = Vote(header.fingerprint, header.step, said.site, said.verdict, said.param)
        self.decision = Decision(said.verdict, vote)
        return self.decision
