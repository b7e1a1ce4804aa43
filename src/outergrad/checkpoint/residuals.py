"""What only one site may go on with: what another has not sent yet, and what it kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outergrad.core.types import StateDict

_UNSENT = ("unsent", "unsent_deltas", "unsent_activations")


def without_debts(state: StateDict, *, start: bool = True) -> StateDict:
    """The state of a session without what it owes; enough for sites that do not take that over.

    Args:
        state: of a session.
        start: whether to leave the weights that `og.LocalSteps` starts from.
    """
    exchanges = [_sent(exchange) for exchange in state["exchanges"]]
    cadence = {**state["cadence"], "formed": {}, "rows": {}, "formed_rows": {}}
    found = {**state, "exchanges": exchanges, "cadence": cadence}
    if not start:
        found.pop("local_steps", None)
    return found


def with_lost(states: Mapping[int, StateDict], sites: int) -> list[StateDict]:
    """The states of all sites that there were; those of lost ones as if they owed nothing.

    Args:
        states: those that there are, by rank; at least one.
        sites: how many there were.
    """
    pattern = without_debts(states[min(states)])
    return [states.get(rank, {**pattern, "rank": rank}) for rank in range(sites)]


def _sent(exchange: StateDict) -> StateDict:
    own = exchange.get("own", {})
    if "memories" not in own:
        return exchange
    memories = {place: _without(saved) for place, saved in own["memories"].items()}
    return {**exchange, "own": {**own, "memories": memories}}


def _without(saved: Mapping[str, Any]) -> StateDict:
    return {key: value for key, value in saved.items() if key not in _UNSENT}
