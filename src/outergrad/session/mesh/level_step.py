"""What backward passes in two levels have in common, pooled or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from outergrad.core.errors import ExchangeError, StepDiscardedError
from outergrad.core.model import Exchanges, Model
from outergrad.core.reasons import Reason
from outergrad.core.types import Unit
from outergrad.planning.plan import Planner
from outergrad.session.mesh.rank_reports import Fate
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.step import SharedStep
from outergrad.step.unsynced import UnsyncedStep


class SharePlanner(Planner):
    """Of one rank's share: what methods remember counts when the step of all shares does."""

    def __init__(self, share: Model, exchanges: Exchanges, sites: int) -> None:
        super().__init__(share, exchanges, sites)
        self._committed = True

    def commit(self, *, applied: bool) -> None:
        """The share has arrived, or is void."""
        self._committed = not applied
        if not applied:
            super().commit(applied=False)

    def conclude(self, *, applied: bool) -> None:
        """So have the others, or not."""
        if not self._committed:
            self._committed = True
            super().commit(applied=applied)


class LevelStep(UnsyncedStep):
    """A backward whose gradients stay on this rank until its end, and then go to all ranks.

    Once begun, all ranks go through all of its messages, even if the backward of one raised.

    Args:
        task: of the backward.
        model: what it runs through.
        used: parameters that it leaves a gradient in.
        number: of the step.
        planner: of what this rank shares with its counterparts.

    Attributes:
        captured: what the backward captures.
        used: parameters that have a gradient, in the end on any rank.
        shared: the step between the sites, if this rank has a share of it.
        tap_next: per unit, whether to tap it in the next forward.
        reasons: per unit, how it travelled, where that is new.
        ended: whether all ranks have been through it.
        applied: whether it counts.
        params: whose gradients they are.
    """

    def __init__(
        self, task: int, model: Model, used: set[str], number: int, planner: SharePlanner
    ) -> None:
        super().__init__(task, Captured(model, used))
        self.used: set[str] = used
        self._number, self._planner = number, planner
        self._error: Exception | None = None
        self.shared: SharedStep | None = None
        self.tap_next: Mapping[Unit, bool] = {}
        self.reasons: Mapping[Unit, Reason] = {}
        self.ended = self.applied = False
        self.params: Mapping[str, Any] = model.params

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the gradients the mean over all ranks.

        Raises:
            StepDiscardedError: some rank raised; what is in `param.grad` is void.
            ExchangeError: some rank of the site is lost, or its counterparts are.
        """
        self._go_through_both(Fate.GOOD)
        if not self.applied:
            self.clear()
        if self._error is not None:
            raise self._error
        if not self.applied:
            raise StepDiscardedError(
                f"another rank raised in step {self._number}: it must not be applied; call "
                f"optimizer.zero_grad() and go on with the next"
            )

    @torch.no_grad()
    def abandon(self) -> None:
        """Ends a step whose backward raised on this rank, together with all others."""
        self._go_through_both(Fate.FAILED)

    def _go_through_both(self, fate: Fate) -> None:
        """Ranks of a site are no sites: an error inside one names none."""
        try:
            self._go_through(fate)
        except ExchangeError as error:
            raise ExchangeError(str(error)) from error

    def clear(self) -> None:
        """The step does not count: there are to be no gradients that could be applied."""
        param_grad.drop(self.params.values())

    def _go_through(self, fate: Fate) -> None:
        raise NotImplementedError

    def _between(self, make: Callable[[], SharedStep], fate: Fate) -> Fate:
        """Goes through a step with this rank's counterparts at the other sites."""
        try:
            self.shared = make()
            if fate != Fate.GOOD:
                self.shared.abandon()
                return fate
            self.shared.finish()
        except StepDiscardedError:
            return Fate.FAILED
        except ExchangeError as error:
            self._error = error
            return Fate.LOST
        except Exception as error:
            self._error = error
            return Fate.FAILED
        return Fate.GOOD

    def _conclude(self, fates: list[Fate]) -> None:
        """The shares of all ranks of this site have ended so.

        Raises:
            ExchangeError: some rank is lost.
        """
        worst = max(fates)
        self.ended, self.applied = True, worst == Fate.GOOD
        self._planner.conclude(applied=self.applied)
        if worst == Fate.LOST:
            why = self._error or "lost its counterparts at the other sites"
            raise ExchangeError(f"local rank {fates.index(worst)}: {why}")
