"""Steps of `og.Gossip`: a site averages its weights with its neighbours' alone."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.capture.claims import GradientClaim
from outergrad.capture.optimizer_steps import SAID, StepCounter, ignore, listen
from outergrad.capture.uncounted import UncountedUpdates
from outergrad.core.sites import Site, called
from outergrad.core.types import StateDict
from outergrad.gossip.content import hollow
from outergrad.gossip.outer import OuterMomentum
from outergrad.gossip.settings import Gossip
from outergrad.record.coverage import Coverage, Travel
from outergrad.record.stats import Since
from outergrad.session.core import Core
from outergrad.session.edge_rounds import EdgeRounds
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.gossip_rounds import Met, Rounds
from outergrad.session.inspect import Inspection
from outergrad.session.loop import BackwardLoop
from outergrad.session.push_rounds import PushRounds
from outergrad.session.updates import SharedGradients
from outergrad.step.cadence import Share

_LOG = logging.getLogger("outergrad")


class SharedWithNeighbours(SharedGradients):
    """Weights are averaged with neighbours after steps of the user's optimizers: `og.Gossip`.

    The user's backward passes share nothing, and no exchange is one of all sites.

    Args:
        inspection: of the model.
        method: says who talks with whom, and how often.

    Attributes:
        inspection: as the argument, with placeholders as its parameters: they take no memory, and
            no backward ever reaches them.
    """

    follows_nodes, are_own = False, True
    why_no_join = (
        "Gossip goes by the steps of each site's own optimizer, and neighbours go on without a "
        "site that makes none: leave the join out"
    )
    why_not_made_equal = (
        "with Gossip every site has weights of its own: call session.average() on every site, "
        "which gives all of them the mean"
    )

    def __init__(self, inspection: Inspection, method: Gossip) -> None:
        self._trained, self._method = dict(inspection.model.params), method
        places = {name: nn.Parameter(hollow(p.detach())) for name, p in self._trained.items()}
        self.inspection = replace(inspection, model=replace(inspection.model, params=places))
        self._number, self._begun, self._late = 0, False, frozenset[str]()

    def attach(
        self, core: Core, failure: FailureHandler, elastic: Elastic, loop: BackwardLoop
    ) -> None:
        """Opens lines to the neighbours, and listens to the user's optimizers."""
        self._core, self._unsettled = core, list[Site]()
        self._at, self._reporter = core.at, core.reporter
        self._failure, self._elastic, comm = failure, elastic, core.at.comm
        self._kinds = [(p.dtype, p.device) for p in self._params]
        self._outer = OuterMomentum(self._params, self._method.lr, self._method.momentum)
        about = self._method, self._params, comm, core.at.number
        pushes = self._method.way.directed
        self._part: Rounds = PushRounds(*about) if pushes else EdgeRounds(*about, self._outer)
        self._since = Since(comm)
        self.counter = StepCounter(self._trained, self._method.every)
        told_of = (lambda: None, self._refuse_uncounted)
        self._uncounted = UncountedUpdates(self._trained, self._method.every, *told_of)
        noted = self._uncounted.on_gradient
        self._claims = [GradientClaim(p, self, noted) for p in self._trained.values()]
        listen(self)

    # -- rounds -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self) -> None:
        """Averages with the neighbours, in as many rounds as the method says.

        With `overlap` it only begins: letters travel while the site makes steps.
        """
        self._refuse_converted()
        self._finish()
        self.counter.restart()
        self._since = Since(self._at.comm)
        self._outer.begin()
        if self._method.overlap:
            self._part.begin(self._number)
            self._outer.end()
            return
        met = self._rounds(self._method.rounds)
        self._outer.end()
        self._report(met)

    def _finish(self) -> bool:
        """Ends the exchange whose letters travel: what they tell moves this site.

        Returns:
            False if there is none.
        """
        if not self._part.is_open:
            return False
        self._report(self._part.end())
        return True

    def _rounds(self, count: int, *, whole: bool = False) -> Met:
        """Exchanges some times in a row.

        Args:
            count: how often.
            whole: whether all weights travel, whatever the method is.
        """
        met, first = Met(), self._number * self._method.rounds
        for step in range(first, first + count):
            self._part.begin(step, whole=whole)
            met += self._part.end()
        return met

    def _report(self, met: Met) -> None:
        self._number += 1
        figures = self._part.figures
        took_part = tuple(site.called for site in sorted(met.heard - met.away))
        about = {"wait_s": met.waited_s, "exchanges": self._number, "took_part": took_part}
        about["neighbour_distance"] = figures.get("neighbour_distance", 0.0)
        stats = self._since.stats(self._number, **about)
        self._at.stats = stats
        self._reporter.gossip(stats, self._tell(met.away), figures)

    # -- between two steps ------------------------------------------------------------------------

    def level(self) -> None:
        """Ends all rounds under way, before a state is saved."""
        self._unsettled = self._part.settle()

    @torch.no_grad()
    def average(self, rounds: int | None) -> None:
        """Makes the weights of all sites their mean; with `rounds`, nearly so, by neighbours alone.

        Raises:
            SiteLostError: without `rounds`, a site is gone.
            ValueError: `rounds` is no number of rounds.
        """
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise ValueError(f"session.average(rounds={rounds!r}): use a whole number, 1 or more")
        self._finish()
        if self._begun and self.counter.any_made:
            self._exchange()
            self._finish()
        self._uncounted.restart()
        unknown = self._part.settle()
        if rounds is not None:
            with self._outer.carrying():
                self._tell(self._rounds(rounds, whole=True).away)
            return
        if unknown:
            raise RuntimeError(
                f"session.average(): {called(unknown)} did not answer, so that there is no mean of "
                f"all sites: call session.average(rounds=n) on those that are left"
            )
        self._average_all()

    def _average_all(self) -> None:
        self._elastic.require_group()
        comm = self._at.comm
        with self._failure.guard_between("the mean of all sites"):
            sums = self._part.summands()
            works = [comm.all_reduce(t.view(-1)) for t in sums]
            for work in works:
                work.wait()
        with self._outer.carrying():
            self._part.take_mean(sums)

    @property
    def _params(self) -> list[nn.Parameter]:
        return list(self._trained.values())

    # -- what users call --------------------------------------------------------------------------

    def next_share(self) -> Share:
        """Returns what a shared step would be about: there is none."""
        return self._core.exchange.whole

    def forget_gradients(self) -> None:
        """Keeps all: gradients are the site's own."""

    def flush(self, *, whole: bool) -> None:
        """Makes the weights of all sites their mean: at the end of a training."""
        self.average(None)

    def stepped(self) -> bool:
        """Counts a step that no optimizer of the model made; True if weights have changed."""
        self._begun = True
        return self._count(SAID)

    def explained(self, lines: Coverage) -> Coverage:
        """Says of each parameter that the site's weights travel, to whom, and how often."""
        return Coverage(tuple(map(self._explained, lines)))

    def _explained(self, line: Travel) -> Travel:
        receivers = self._part.receivers
        if line.parameter not in self._trained or not receivers:
            return line
        k = self._method.every
        often = "every step" if k == 1 else f"every {k} steps"
        near = called(receivers)
        travels = self._method.how.travels(self._trained[line.parameter])
        why = f"this site's weights, {often}, to {near} alone"
        return replace(line, travels=travels, why=why, reveals=f"this site's weights, to {near}")

    def state(self) -> StateDict:
        """Returns what is known of the exchanges with neighbours."""
        unsettled = [int(site) for site in self._unsettled]
        about = {"number": self._number, "made": dict(self.counter.made), "unsettled": unsettled}
        return {"gossip": {**about, "outer": self._outer.state(), "part": self._part.state()}}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state; an edge that was under way at one end begins anew at both."""
        found = state["gossip"]
        self._number, self._begun = found["number"], True
        self.counter.resume(found["made"])
        self._uncounted.restart()
        self._outer.load(found["outer"])
        self._part.load(found["part"], found["unsettled"])
        self._since = Since(self._at.comm)

    def detach(self) -> None:
        """Lets go of the model and of the user's optimizers, and says goodbye to the neighbours."""
        self._finish()
        self.release()

    def release(self) -> None:
        """Lets go of the model."""
        ignore(self)
        for claim in self._claims:
            claim.remove()
        self._part.close()

    # -- what optimizers call ---------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Notes that training has begun."""
        if self.counter.holder(optimizer) is not None:
            self._begin()

    def _begin(self) -> None:
        """Notes the weights that all steps begin at."""
        if not self._begun:
            self._outer.start_here()
        self._begun = True

    def after_step(self, optimizer: Optimizer) -> None:
        """Counts a step of this site, after which it may exchange."""
        holder = self.counter.holder(optimizer)
        if holder is not None:
            self._count(holder)

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Counts a step that a `GradScaler` skipped here: the neighbours must not wait."""
        self.after_step(optimizer)

    def _count(self, holder: str) -> bool:
        self._uncounted.restart()
        self.counter.count(holder)
        ended = self.counter.reached(self._method.overlap) and self._finish()
        if not self.counter.due:
            return ended
        self._exchange()
        if SAID not in self.counter.made:
            self._uncounted.exchanged(self.counter.unheld)
        return True

    def _refuse_uncounted(self, name: str, why: str) -> None:
        raise RuntimeError(f"Gossip: {self._at.me.called} {why.format(name=repr(name))}")

    def _refuse_converted(self) -> None:
        for (name, now), (dtype, device) in zip(self._trained.items(), self._kinds, strict=True):
            if (now.dtype, now.device) != (dtype, device):
                raise RuntimeError(
                    f"{name!r} was {dtype} on {device} when the model was distributed "
                    f"and is {now.dtype} on {now.device}: call session.detach(), convert, and "
                    f"distribute again on every site"
                )

    # -- what is told -----------------------------------------------------------------------------

    def _tell(self, away: frozenset[Site]) -> tuple[str, ...]:
        """Logs once that a neighbour is away, and once that it is back; returns who is away."""
        late = tuple(site.called for site in sorted(away))
        gone, back = set(late) - self._late, self._late - set(late)
        me = self._at.me.called
        for site in sorted(away):
            if site.called in gone:
                _LOG.warning(
                    "%s goes on without %s: %s", me, site.called, self._part.why_away(site)
                )
        if back:
            _LOG.warning("%s hears %s again", me, ", ".join(sorted(back)))
        self._late = frozenset(late)
        return late
