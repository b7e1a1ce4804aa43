"""Rounds of exchanges both ways: a site and its neighbours move towards each other."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outergrad.core.sites import Site
from outergrad.core.transport import Comm, Letter, Lines
from outergrad.core.types import StateDict
from outergrad.gossip.content import hollow
from outergrad.gossip.ends import End, Weights, Whole
from outergrad.gossip.graphs import neighbours
from outergrad.gossip.mixing import metropolis
from outergrad.gossip.outer import OuterMomentum
from outergrad.gossip.settings import Gossip
from outergrad.session.gossip_rounds import Met

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
        fault: why nothing more is read of the neighbour; "" while it keeps to the rules.
    """

    def __init__(self, site: Site, end: End) -> None:
        self.site, self.end, self.done = site, end, 0
        self.told = self.unanswered = 0
        self.ended: int | None = None
        self.is_cold, self.fault = False, ""
        self._said: tuple[End, Letter] | None = None

    @property
    def said_bytes(self) -> int:
        """Length of what this site has said in the round."""
        return 0 if self._said is None else self._said[1].content.numel()

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

    def skip(self) -> None:
        """Ends a round in which both ends have said things of other kinds: it moves nobody."""
        self._said, self.done = None, self.done + 1

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


@dataclass
class Round:
    """Whom this site has asked, and what has come of it.

    With `og.Gossip(overlap=...)` it lasts while the site makes steps. What comes meanwhile is kept
    in `moves`: so it counts after the same step however quick the letters are, and a state may be
    saved in between without a change of the weights.

    Attributes:
        drawn: the neighbours of this step of the graph.
        asked: those of them that this site has sent a letter.
        moves: how far letters move each weight when the round ends; None where they do at once.
        came: of those heard, the square of how far away their weights were.
    """

    drawn: Sequence[Site]
    asked: Sequence[Site]
    moves: list[Tensor] | None = None
    came: dict[Site, float] = field(default_factory=dict)

    @property
    def heard(self) -> frozenset[Site]:
        """The sites that were asked and heard."""
        return frozenset(site for site in self.asked if site in self.came)

    @property
    def away(self) -> frozenset[Site]:
        """The sites of this step of the graph that were not heard."""
        return frozenset(self.drawn) - self.heard

    @property
    def distance(self) -> float | None:
        """Root mean square of how far away those heard were; None if that is not known of any."""
        squares = [self.came[site] for site in self.heard if math.isfinite(self.came[site])]
        return (sum(squares) / len(squares)) ** 0.5 if squares else None

    def state(self) -> StateDict:
        """Returns what is to be saved, with copies of tensors."""
        numbers = {"drawn": [*map(int, self.drawn)], "asked": [*map(int, self.asked)]}
        moves = None if self.moves is None else [t.clone() for t in self.moves]
        return {**numbers, "came": {int(s): x for s, x in self.came.items()}, "moves": moves}


class EdgeRounds:
    """Rounds over undirected edges, each of which counts at both ends.

    Args:
        method: says who talks with whom, and what is told.
        shown: the weights, which the user's optimizers change, the same at all sites.
        comm: the transport.
        number: of the session.
        outer: is told of what moves the weights between two exchanges.
    """

    def __init__(
        self,
        method: Gossip,
        shown: Sequence[Tensor],
        comm: Comm,
        number: int,
        outer: OuterMomentum,
    ) -> None:
        self._method, self._comm, self._outer = method, comm, outer
        self._shown, self._me = shown, comm.sites[comm.rank].called
        # What all sites have now, to the bit: both ends of an edge begin from it.
        kept = Tensor.clone if method.how.reads_start else hollow
        self._start = [kept(p.detach()) for p in shown]
        near = neighbours(method.way, comm.world_size, comm.rank)
        self._edges = {site: Edge(comm.sites[site], self._end(site)) for site in near}
        self._whole_bytes = Whole().most_bytes(self._start)
        self._lines: Lines | None = None
        if near:
            most = max(method.how.most_bytes(self._start), self._whole_bytes)
            self._lines = comm.exchange_with(near, number, most)
        self._now: Round | None = None
        self._distance, self._odd = 0.0, set[Site]()

    def _end(self, site: int) -> End:
        """Returns this site's end of an edge of which nothing is known yet."""
        rank = self._comm.rank
        about = min(rank, site), max(rank, site)
        return self._method.how.end(self._start, *about, is_first=rank < site)

    @property
    def receivers(self) -> list[Site]:
        """The neighbours, of any step."""
        return [edge.site for edge in self._edges.values()]

    @property
    def is_open(self) -> bool:
        """True if a round has begun and not ended."""
        return self._now is not None

    @property
    def figures(self) -> dict[str, float]:
        """The distance of the neighbours' weights, by the figure's name."""
        return {"neighbour_distance": self._distance}

    @torch.no_grad()
    def begin(self, step: int, *, whole: bool = False) -> None:
        """Sends the letters of a round.

        Args:
            step: of the graph.
            whole: whether all weights travel, whatever the method is.
        """
        for edge in self._edges.values():
            self._hear(edge, 0.0)  # what was said too late for an earlier round
        weights, shares = Weights(self._shown), self._shares(step)
        how = Whole() if whole else self._method.how
        drawn = [self._edges[site] for site in sorted(shares)]
        begun = [e for e in drawn if e.is_free and not self._closed(e.site)]
        for edge in begun:
            end = how.end(self._start, 0, 0, is_first=True) if whole else None
            share = shares[edge.site] * how.gamma
            self._line.send(edge.site, edge.say(weights, share, end))
        self._now = Round([edge.site for edge in drawn], [edge.site for edge in begun])
        if self._method.overlap and not whole:
            self._now.moves = [torch.zeros_like(p) for p in self._shown]

    @torch.no_grad()
    def end(self) -> Met:
        """Reads the letters of the round, and moves the weights."""
        assert self._now is not None
        now, began = self._now, time.monotonic()
        for site in now.asked:
            self._hear(self._edges[site], began + self._comm.patience_s)
        if now.distance is not None:
            self._distance = now.distance
        if now.moves is not None:
            for p, d in zip(self._shown, now.moves, strict=True):
                p.add_(d)
            self._outer.moved(now.moves, 1.0)
        self._now = None
        return Met(now.heard, now.away, time.monotonic() - began)

    def _shares(self, step: int) -> dict[int, float]:
        """Returns the neighbours of a step, with the weights of their edges."""
        rank, sites = self._comm.rank, self._comm.world_size
        weights = metropolis(self._method.way.edges(sites, step)).items()
        return {i + j - rank: weight for (i, j), weight in weights if rank in (i, j)}

    def _hear(self, edge: Edge, until: float) -> None:
        """Reads what a neighbour says until its round is over or, in settling, both settled."""
        while (edge.is_waiting or edge.unanswered) and not edge.fault:
            if edge.ended is not None:
                if not edge.unanswered:
                    break  # it settles, and this site will
                edge.settle(self._end(edge.site) if edge.is_cold else edge.end)
                continue
            letter = self._line.next(edge.site, until)
            if letter is None:
                break
            if letter.ends:
                edge.hear_last_words(letter)
            elif edge.is_waiting and letter.number == edge.done + 1:
                self._move(edge, letter)

    def _move(self, edge: Edge, letter: Letter) -> None:
        """Moves this site's weights; one of both whose weights are not finite moves nobody.

        Where one end is in a round of `session.average(rounds=n)`, of whole weights, and the other
        is late, the round moves nobody, at both. A neighbour whose letter cannot be read is left
        out for good.
        """
        sizes = {letter.content.numel(), edge.said_bytes}
        has_kinds = not isinstance(self._method.how, Whole)
        if has_kinds and len(sizes) == 2 and self._whole_bytes in sizes:
            edge.skip()
            return
        try:
            share, difference = edge.hear(letter)
        except ValueError as error:
            edge.fault = str(error)
            return
        square, now = sum(map(_square, difference)), self._now
        if now is not None:
            now.came[edge.site] = square
        kept = self._kept(edge.site, square**0.5)
        if not kept:
            return
        share *= kept
        moves = None if now is None else now.moves
        for t, d in zip(self._shown if moves is None else moves, difference, strict=True):
            t.add_(d, alpha=share)
        if moves is None:
            self._outer.moved(difference, share)

    def _kept(self, site: Site, distance: float) -> float:
        """Returns the share of a difference that counts, at both; tells once why not all."""
        clip = math.inf if self._method.clip is None else self._method.clip
        is_finite = math.isfinite(distance)
        if is_finite and distance <= clip:
            self._odd.discard(site)
            return 1.0
        is_new = site not in self._odd
        self._odd.add(site)
        if not is_finite:
            if is_new:
                told = "%s or %s has weights that are not finite: they are not averaged"
                _LOG.warning(told, self._me, site.called)
            return 0.0
        if is_new:
            told = "%s is %.3g away from %s, which counts as clip=%g"
            _LOG.warning(told, site.called, distance, self._me, clip)
        return clip / distance

    # -- between two steps ------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, cold: Sequence[int] = ()) -> list[Site]:
        """Ends all rounds that both ends have begun, and gives up all others; called on all sites.

        Args:
            cold: neighbours whose edges begin anew.

        Returns:
            Neighbours that have not settled in time: no round with them begins before they have.
        """
        for site, edge in self._edges.items():
            self._line.send(site, edge.last_words(cold=site in cold))
        until = time.monotonic() + self._comm.patience_s
        for edge in self._edges.values():
            self._hear(edge, until)
        return [edge.site for edge in self._edges.values() if edge.unanswered]

    def summands(self) -> list[Tensor]:
        """Returns copies of the weights, whose sum over all sites gives their mean."""
        return [p.detach().clone(memory_format=torch.contiguous_format) for p in self._shown]

    def take_mean(self, sums: Sequence[Tensor]) -> None:
        """Makes the weights the mean.

        Args:
            sums: of what all sites' `summands` returned.
        """
        for p, total in zip(self._shown, sums, strict=True):
            p.copy_(total.div(self._comm.world_size))

    def why_away(self, site: int) -> str:
        """Returns why a neighbour is away."""
        return self._closed(site) or "it did not answer in time"

    def state(self) -> StateDict:
        """Returns what is known at this site's ends of the edges."""
        edges = {site: edge.state() for site, edge in self._edges.items()}
        return {"edges": edges, "now": None if self._now is None else self._now.state()}

    def load(self, state: StateDict, unsettled: Sequence[int]) -> None:
        """Goes on from a saved state; called on all sites.

        Args:
            state: what `state()` returned.
            unsettled: neighbours that had not settled by then: their edges begin anew, at both.
        """
        for site, edge in self._edges.items():
            edge.load(state["edges"][site])
        self._now = None if state["now"] is None else self._resumed(state["now"])
        self.settle(cold=unsettled)

    def _resumed(self, state: StateDict) -> Round:
        """Returns a round that a state was saved in."""
        drawn, asked = ([self._edges[s].site for s in state[key]] for key in ("drawn", "asked"))
        moves = [t.to(p, copy=True) for p, t in zip(self._shown, state["moves"], strict=True)]
        came = {self._edges[site].site: square for site, square in state["came"].items()}
        return Round(drawn, asked, moves, came)

    def close(self) -> None:
        """Says goodbye to the neighbours."""
        if self._lines is not None:
            self._lines.close()

    @property
    def _line(self) -> Lines:
        assert self._lines is not None  # there are neighbours
        return self._lines

    def _closed(self, site: int) -> str:
        return self._edges[site].fault or self._line.why_closed(site)


def _square(t: Tensor) -> float:
    """Returns the square of a tensor's norm, not finite where one of its numbers is not."""
    real = torch.view_as_real(t) if t.is_complex() else t
    return float(real.double().square().sum())
