"""Steps of `og.Gossip`: a site averages its weights with its neighbours' alone."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.claims import GradientClaim
from outergrad.capture.optimizer_steps import SAID, StepCounter, ignore, listen
from outergrad.capture.uncounted import UncountedUpdates
from outergrad.core.sites import Site, called
from outergrad.core.transport import Letter, Lines
from outergrad.core.types import StateDict
from outergrad.gossip.ends import End, Weights, Whole
from outergrad.gossip.graphs import neighbours
from outergrad.gossip.mixing import metropolis
from outergrad.gossip.outer import OuterMomentum
from outergrad.gossip.settings import Gossip
from outergrad.record.coverage import Coverage, Travel
from outergrad.record.stats import Since
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.gossip_round import Round
from outergrad.session.inspect import Inspection
from outergrad.session.loop import BackwardLoop
from outergrad.session.updates import SharedGradients
from outergrad.step.cadence import Share

_LOG = logging.getLogger("outergrad")


class Edge:
    """This site's end of the edge to one neighbour: a sequence of rounds.

    A round counts here once both letters are there: what this site said, and what the neighbour
    did. It counts at the neighbour in the same way, and moves both by the same amount in opposite
    directions. So whoever is late, the sum of both sites' weights is what it was once both have
    heard each other. No new round begins before.

    Sites settle before a state is saved, or a mean is formed: each says which round it has begun
    last. Where one has begun a round more, it gives that up. Until both have said so, as often as
    each other, no round begins, so that nothing is lost where one of them is late.

    Args:
        site: the neighbour.
        end: says and hears.

    Attributes:
        site: as the argument.
        end: as the argument.
        done: number of the last round that counts here.
        told: number of the last round that this site has begun, as it said when it settled.
        unanswered: how often it has said so and the neighbour has not.
        ended: number of the last round that the neighbour said it has begun; None if this site has
            said so as often.
        is_cold: whether both go on from a new end, once they have settled.
    """

    def __init__(self, site: Site, end: End) -> None:
        self.site, self.end, self.done = site, end, 0
        self.told = self.unanswered = 0
        self.ended: int | None = None
        self.is_cold = False
        self._said: tuple[End, Letter] | None = None

    @property
    def is_waiting(self) -> bool:
        """True if this site has said something and heard nothing yet."""
        return self._said is not None

    @property
    def is_free(self) -> bool:
        """True if a round may begin."""
        return not self.is_waiting and not self.unanswered and self.ended is None

    def say(self, weights: Weights, share: float, end: End | None = None) -> Letter:
        """Begins a round.

        Args:
            weights: of this site, now.
            share: of the difference, by which this site would move.
            end: another end for this round; None for the edge's own.
        """
        end = self.end if end is None else end
        letter = Letter(self.done + 1, share, end.say(weights))
        self._said = end, letter
        return letter

    def hear(self, letter: Letter) -> tuple[float, list[Tensor]]:
        """Ends a round; returns the share that counts, and how far the neighbour's weights are.

        The sites may be at different steps of a graph that changes: the smaller share counts.
        """
        assert self._said is not None
        end, own = self._said
        difference = end.hear(own.content, letter.content)
        self._said, self.done = None, self.done + 1
        return min(own.share, letter.share), difference

    def last_words(self, *, cold: bool) -> Letter:
        """Begins to settle, and says which round this site has begun last."""
        self.told, self.is_cold = self.done + self.is_waiting, cold
        self.unanswered += 1
        return Letter(self.told, float(cold), torch.empty(0, dtype=torch.uint8), ends=True)

    def hear_last_words(self, letter: Letter) -> None:
        """Notes which round the neighbour has begun last."""
        self.ended, self.is_cold = letter.number, self.is_cold or letter.share > 0

    def settle(self, end: End) -> None:
        """Gives up a round that one of both has not begun; both go on behind the later one.

        Args:
            end: to go on with.
        """
        assert self.ended is not None
        self.done, self.end = max(self.told, self.ended), end
        self._said, self.ended, self.is_cold = None, None, False
        self.unanswered -= 1

    def state(self) -> StateDict:
        """Returns what is to be saved, with copies of tensors."""
        return {"done": self.done, "end": self.end.memory.state()}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state, and forgets a round under way."""
        self.done, self._said = state["done"], None
        self.end.memory.load(state["end"])


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
        places = {name: nn.Parameter(_hollow(p.detach())) for name, p in self._trained.items()}
        self.inspection = replace(inspection, model=replace(inspection.model, params=places))
        self._number, self._distance, self._begun = 0, 0.0, False
        self._now: Round | None = None
        """The exchange under way."""
        self._late, self._clipped = frozenset[str](), set[Site]()

    def attach(
        self, core: Core, failure: FailureHandler, elastic: Elastic, loop: BackwardLoop
    ) -> None:
        """Opens lines to the neighbours, and listens to the user's optimizers."""
        self._core, self._unsettled = core, list[Site]()
        self._at, self._reporter = core.at, core.reporter
        self._failure, self._elastic, comm = failure, elastic, core.at.comm
        # What all sites have now, to the bit: both ends of an edge begin from it.
        kept = Tensor.clone if self._method.how.reads_start else _hollow
        self._start = [kept(p.detach()) for p in self._trained.values()]
        near = neighbours(self._method.way, comm.world_size, comm.rank)
        self._edges = {site: Edge(comm.sites[site], self._end(site)) for site in near}
        most = max(m.most_bytes(self._start) for m in (self._method.how, Whole()))
        self._lines: Lines | None = None
        if near:
            self._lines = comm.exchange_with(near, core.at.number, most)
        self._outer = OuterMomentum(self._params, self._method.lr, self._method.momentum)
        self.counter = StepCounter(self._trained, self._method.every)
        told_of = (lambda: None, self._refuse_uncounted)
        self._uncounted = UncountedUpdates(self._trained, self._method.every, *told_of)
        noted = self._uncounted.on_gradient
        self._claims = [GradientClaim(p, self, noted) for p in self._trained.values()]
        listen(self)

    def _end(self, site: int) -> End:
        """Returns this site's end of an edge of which nothing is known yet."""
        rank = self._at.comm.rank
        about = min(rank, site), max(rank, site)
        return self._method.how.end(self._start, *about, is_first=rank < site)

    # -- rounds -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self) -> None:
        """Averages with the neighbours, in as many rounds as the method says.

        With `overlap` it only begins: letters travel while the site makes steps.
        """
        self._refuse_converted()
        self._finish()
        self.counter.restart()
        since, rounds = Since(self._at.comm), self._method.rounds
        self._outer.begin()
        if self._method.overlap:
            self._now = self._send(self._number, since)
            self._now.moves = [torch.zeros_like(p) for p in self._params]
            self._outer.end()
            return
        heard, away, waited_s = self._rounds(rounds)
        self._outer.end()
        self._report(since, heard, away, waited_s)

    @torch.no_grad()
    def _finish(self) -> bool:
        """Ends the exchange whose letters travel: what they tell moves this site.

        Returns:
            False if there is none.
        """
        if (now := self._now) is None:
            return False
        waited_s = self._receive(now)
        assert now.moves is not None
        for p, d in zip(self._params, now.moves, strict=True):
            p.add_(d)
        self._outer.moved(now.moves, 1.0)
        self._report(now.since, now.heard, now.away, waited_s)
        return True

    def _report(self, since: Since, heard: set[Site], away: set[Site], waited_s: float) -> None:
        self._number += 1
        took_part = tuple(site.called for site in sorted(heard - away))
        more = {"wait_s": waited_s, "exchanges": self._number, "took_part": took_part}
        stats = since.stats(self._number, neighbour_distance=self._distance, **more)
        self._at.stats = stats
        late = self._tell(away)
        self._reporter.gossip(stats, late)

    def _rounds(self, count: int, *, whole: bool = False) -> tuple[set[Site], set[Site], float]:
        """Exchanges some times in a row.

        Args:
            count: how often.
            whole: whether all weights travel, whatever the method is.

        Returns:
            The neighbours that were heard, those that were not, and the seconds of waiting.
        """
        heard, away, waited_s = set[Site](), set[Site](), 0.0
        first = self._number * self._method.rounds
        for step in range(first, first + count):
            self._now = now = self._send(step, Since(self._at.comm), whole=whole)
            waited_s += self._receive(now)
            heard |= now.heard
            away |= now.away
        return heard, away, waited_s

    @torch.no_grad()
    def _send(self, step: int, since: Since, *, whole: bool = False) -> Round:
        """Begins a round with the neighbours of a step of the graph."""
        if self._lines is None:
            return Round((), (), since)
        for edge in self._edges.values():
            self._hear(edge, 0.0)  # what was said too late for an earlier round
        weights, shares = Weights(self._params), self._shares(step)
        how = Whole() if whole else self._method.how
        drawn = [self._edges[site] for site in sorted(shares)]
        begun = [e for e in drawn if e.is_free and not self._lines.why_closed(e.site)]
        for edge in begun:
            end = how.end(self._start, 0, 0, is_first=True) if whole else None
            share = shares[edge.site] * how.gamma
            self._lines.send(edge.site, edge.say(weights, share, end))
        return Round([edge.site for edge in drawn], [edge.site for edge in begun], since)

    @torch.no_grad()
    def _receive(self, now: Round) -> float:
        """Ends a round; returns the seconds of waiting."""
        began = time.monotonic()
        for site in now.asked:
            self._hear(self._edges[site], began + self._patience_s)
        if now.distance is not None:
            self._distance = now.distance
        self._now = None
        return time.monotonic() - began

    def _shares(self, step: int) -> dict[int, float]:
        """Returns the neighbours of a step, with the weights of their edges."""
        rank, sites = self._at.comm.rank, self._at.comm.world_size
        weights = metropolis(self._method.way.edges(sites, step)).items()
        return {i + j - rank: weight for (i, j), weight in weights if rank in (i, j)}

    def _hear(self, edge: Edge, until: float) -> None:
        """Reads what a neighbour says until its round is over or, in settling, both settled."""
        assert self._lines is not None
        while edge.is_waiting or edge.unanswered:
            if edge.ended is not None:
                if not edge.unanswered:
                    break  # it settles, and this site will
                edge.settle(self._end(edge.site) if edge.is_cold else edge.end)
                continue
            letter = self._lines.next(edge.site, until)
            if letter is None:
                break
            if letter.ends:
                edge.hear_last_words(letter)
            elif edge.is_waiting and letter.number == edge.done + 1:
                self._move(edge, letter)

    def _move(self, edge: Edge, letter: Letter) -> None:
        """Moves this site's weights; one of both whose weights are not finite moves nobody."""
        try:
            share, difference = edge.hear(letter)
        except ValueError as error:
            raise RuntimeError(f"Gossip: of {edge.site.called}: {error}") from error
        square, now = sum(map(_square, difference)), self._now
        if now is not None:
            now.came[edge.site] = square
        if not math.isfinite(square):
            near = f"{self._at.me.called} or {edge.site.called}"
            _LOG.warning("%s has weights that are not finite: they are not averaged", near)
            return
        share *= self._kept(edge.site, square**0.5)
        moves = None if now is None else now.moves
        for t, d in zip(self._params if moves is None else moves, difference, strict=True):
            t.add_(d, alpha=share)
        if moves is None:
            self._outer.moved(difference, share)

    def _kept(self, site: Site, distance: float) -> float:
        """Returns the share of a difference that counts, the same at both; names whom it bounds."""
        clip = self._method.clip
        if clip is None or distance <= clip:
            self._clipped.discard(site)
            return 1.0
        if site not in self._clipped:
            self._clipped.add(site)
            told = "%s is %.3g away from %s, which counts as clip=%g"
            _LOG.warning(told, site.called, distance, self._at.me.called, clip)
        return clip / distance

    @property
    def _patience_s(self) -> float:
        return self._at.comm.patience_s

    # -- between two steps ------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, cold: Sequence[int] = ()) -> list[Site]:
        """Ends all rounds that both ends have begun, and gives up all others; called on all sites.

        Args:
            cold: neighbours whose edges begin anew.

        Returns:
            Neighbours that have not settled in time: no round with them begins before they have.
        """
        if self._lines is None:
            return []
        for site, edge in self._edges.items():
            self._lines.send(site, edge.last_words(cold=site in cold))
        until = time.monotonic() + self._patience_s
        for edge in self._edges.values():
            self._hear(edge, until)
        return [edge.site for edge in self._edges.values() if edge.unanswered]

    def level(self) -> None:
        """Ends all rounds under way, before a state is saved."""
        self._unsettled = self.settle()

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
        unknown = self.settle()
        if rounds is not None:
            with self._outer.carrying():
                self._tell(self._rounds(rounds, whole=True)[1])
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
            sums = [p.detach().clone(memory_format=torch.contiguous_format) for p in self._params]
            works = [comm.all_reduce(t.view(-1)) for t in sums]
            for work in works:
                work.wait()
        with self._outer.carrying():
            for p, total in zip(self._params, sums, strict=True):
                p.copy_(total.div_(comm.world_size))

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
        if line.parameter not in self._trained or not self._edges:
            return line
        k = self._method.every
        often = "every step" if k == 1 else f"every {k} steps"
        near = called([edge.site for edge in self._edges.values()])
        travels = self._method.how.travels(self._trained[line.parameter])
        why = f"this site's weights, {often}, to {near} alone"
        return replace(line, travels=travels, why=why, reveals=f"this site's weights, to {near}")

    def state(self) -> StateDict:
        """Returns what is known at this site's ends of the edges."""
        unsettled = [int(site) for site in self._unsettled]
        edges = {site: edge.state() for site, edge in self._edges.items()}
        about = {"number": self._number, "made": dict(self.counter.made), "unsettled": unsettled}
        about["outer"] = self._outer.state()
        about["now"] = None if self._now is None else self._now.state()
        return {"gossip": {**about, "edges": edges}}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state; an edge that was under way at one end begins anew at both."""
        found = state["gossip"]
        self._number, self._begun = found["number"], True
        self.counter.resume(found["made"])
        self._uncounted.restart()
        for site, edge in self._edges.items():
            edge.load(found["edges"][site])
        self._outer.load(found["outer"])
        self._now = None if found["now"] is None else self._resumed(found["now"])
        self.settle(cold=found["unsettled"])

    def _resumed(self, state: StateDict) -> Round:
        """Returns a round that a state was saved in."""
        drawn, asked = ([self._edges[s].site for s in state[key]] for key in ("drawn", "asked"))
        pairs = zip(self._params, state["moves"], strict=True)
        moves = [t.to(p, copy=True) for p, t in pairs]
        came = {self._edges[site].site: square for site, square in state["came"].items()}
        return Round(drawn, asked, Since(self._at.comm), moves, came)

    def detach(self) -> None:
        """Lets go of the model and of the user's optimizers, and says goodbye to the neighbours."""
        self._finish()
        self.release()

    def release(self) -> None:
        """Lets go of the model."""
        ignore(self)
        for claim in self._claims:
            claim.remove()
        if self._lines is not None:
            self._lines.close()

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
        for (name, now), then in zip(self._trained.items(), self._start, strict=True):
            if (now.dtype, now.device) != (then.dtype, then.device):
                raise RuntimeError(
                    f"{name!r} was {then.dtype} on {then.device} when the model was distributed "
                    f"and is {now.dtype} on {now.device}: call session.detach(), convert, and "
                    f"distribute again on every site"
                )

    # -- what is told -----------------------------------------------------------------------------

    def _tell(self, away: set[Site]) -> tuple[str, ...]:
        """Logs once that a neighbour is away, and once that it is back; returns who is away."""
        late = tuple(site.called for site in sorted(away))
        gone, back = set(late) - self._late, self._late - set(late)
        me = self._at.me.called
        for edge in self._edges.values():
            if edge.site.called in gone:
                assert self._lines is not None
                why = self._lines.why_closed(edge.site) or "it did not answer in time"
                _LOG.warning("%s goes on without %s: %s", me, edge.site.called, why)
        if back:
            _LOG.warning("%s hears %s again", me, ", ".join(sorted(back)))
        self._late = frozenset(late)
        return late


def _hollow(t: Tensor) -> Tensor:
    """Returns a tensor of the same shape, dtype and device that takes no memory."""
    return t.new_empty(()).expand(t.shape)


def _square(t: Tensor) -> float:
    """Returns the square of a tensor's norm, not finite where one of its numbers is not."""
    real = torch.view_as_real(t) if t.is_complex() else t
    return float(real.double().square().sum())
