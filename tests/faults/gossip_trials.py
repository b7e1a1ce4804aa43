"""What a trial of gossip's fault harness is: drawn at random, the same again from the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import outergrad as og
from outergrad.gossip import Choco, PowerGossip

WAYS = ("gloo", "gloo", "star", "blind star")
"""How sites reach each other; one in two over gloo."""
GRAPHS = ("ring", "complete", "exponential", "random")
HOW = {
    "whole": None,
    "power": PowerGossip(rank=2),
    "choco": Choco(reduce=og.wire.TopK(0.3), gamma=0.2),
}
WEIGHTS = {"kill": 34, "stop": 18, "late": 16, "damage": 18, "cut": 14}
MOMENTS = ("before", "sent", "hearing", "moved", "any", "averaging")
"""Where in a step: before it, behind a letter, before one is awaited, behind a move, some time
after the step began, or in `session.average(rounds=n)`."""
LONG_STOP_S = 8.0
"""Longer than a hub waits for a site that is silent."""
STEPS = 10


@dataclass(frozen=True, kw_only=True)
class GossipTrial:
    """Sites that gossip, one of which meets with a fault.

    Attributes:
        number: of the trial in its run.
        way: one of `WAYS`.
        graph: who talks with whom.
        how: key of `HOW`.
        sites: S.
        kind: of the fault, a key of `WEIGHTS`.
        victim: the site.
        step: in which it happens.
        moment: where in the step.
        index: which letter from that step on, counted from 0.
        pause_s: for how long a site is stopped or sleeps; how long after the step began, for "any".
        field: what is damaged, a field of a letter's head.
        timeout_s: for how long a site waits for its neighbours.
    """

    number: int
    way: str
    graph: str
    how: str
    sites: int
    kind: str
    victim: int
    step: int
    moment: str
    index: int
    pause_s: float
    field: str
    timeout_s: float = 1.0

    @property
    def is_lethal(self) -> bool:
        """Whether the victim is gone for the others, even if it lives."""
        long_stop = self.kind == "stop" and self.pause_s >= LONG_STOP_S
        return self.kind == "kill" or (long_stop and self.way != "gloo")

    @property
    def may_lose_a_letter(self) -> bool:
        """Whether a round may count at one end of an edge alone."""
        return self.is_lethal or self.kind == "damage" or (self.kind, self.way) == ("cut", "gloo")


def draw(number: int, seed: int, ways: tuple[str, ...] = WAYS) -> GossipTrial:
    """One trial of a run."""
    draws = random.Random(1_000_003 * seed + number)
    kind = draws.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    sites, moment = draws.randint(2, 5), draws.choice(MOMENTS)
    if kind == "damage":
        moment = "sent"
    elif kind == "cut" and moment in ("any", "averaging"):
        moment = "hearing"
    elif kind == "late" and moment == "any":
        moment = "before"
    pause_s = {"stop": draws.choice((0.2, 1.5, LONG_STOP_S)), "late": draws.choice((0.3, 1.5, 2.5))}
    return GossipTrial(
        number=number,
        way=draws.choice(ways),
        graph=draws.choice(GRAPHS),
        how=draws.choice(list(HOW)),
        sites=sites,
        kind=kind,
        victim=draws.randrange(sites),
        step=draws.randrange(STEPS),
        moment=moment,
        index=draws.randrange(3),
        pause_s=pause_s.get(kind, 0.0) if moment != "any" or kind == "stop" else 0.0,
        field=draws.choice(("check", "number", "share", "session")),
    )
