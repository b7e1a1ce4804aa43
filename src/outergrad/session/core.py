"""The objects that the parts of a session share."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.session.exchange import Exchange
from outergrad.session.loaded_weights import LoadedWeights
from outergrad.session.membership import Membership
from outergrad.session.ranks import OneRank
from outergrad.session.reporting import Reporter
from outergrad.session.running_step import RunningStep
from outergrad.step.mishaps import Mishaps
from outergrad.step.tentative import Tentative


@dataclass(frozen=True)
class Core:
    """Objects that the parts of a session share.

    Attributes:
        at: the session's membership.
        exchange: what it shares.
        running: the step that runs.
        ranks: how the ranks of this site come together.
        reporter: tells recorders of steps.
        mishaps: counts and reports steps that do not count.
        tentative: takes back what is remembered of gradients that were thrown away.
        loaded: warns of weights that were loaded without what is owed.
    """

    at: Membership
    exchange: Exchange
    running: RunningStep
    ranks: OneRank
    reporter: Reporter
    mishaps: Mishaps
    tentative: Tentative
    loaded: LoadedWeights
