"""Sentences for people about the events of a hub, in the names of its sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outergrad.star.connections import host_in

Facts = Mapping[str, Any]
LEFT = "it left"
"""Reason of a site that has left in order."""
GOES_ON = "it goes on with"
"""Beginning of the reason of a site that has left because others were lost, or have come."""


def sentence(what: str, facts: Facts) -> str:
    """Returns one line about an event of the log; empty if the event is for the log alone.

    Args:
        what: name of the event.
        facts: of the event, as in the log.
    """
    told = _SENTENCES.get(what, lambda _: "")(facts)
    return told and told + _more(facts)


def listed(names: list[str]) -> str:
    """Formats names as in a sentence."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])


def going_on_with(names: Sequence[str]) -> str:
    """Returns the reason of a site that has left a run to go on in the next one."""
    return f"{GOES_ON} {', '.join(names)}"


def _more(facts: Facts) -> str:
    """Says how often an event has happened that is not told each time."""
    times = facts.get("times")
    return f" (and {times} more times within {facts['within_s']:g} s)" if times else ""


def _joined(facts: Facts) -> str:
    missing = facts.get("missing")
    waits = f"; the run waits for {listed(missing)}" if missing else ""
    return f"{facts['site']} joins{_from(facts)}{waits}"


def _from(facts: Facts) -> str:
    """Says where a site calls from; without the port, which is another one at each call."""
    host = host_in(str(facts.get("peer", "")))
    return f" from {host}" if host else ""


def _away(facts: Facts) -> str:
    return (
        f"{facts['site']} goes away: its line is down; after {facts['grace_s']:g} s it counts as "
        f"lost"
    )


def _left(facts: Facts) -> str:
    return f"{facts['site']} leaves" if facts["why"] == LEFT else ""


def _epoch(facts: Facts) -> str:
    without, come = facts["without"], facts["back"]
    stay = [name for name in facts["sites"] if name not in come]
    goes = f"{listed(stay)} go{'es' * (len(stay) == 1)} on"
    less = f", without {listed(without)}" if without else ""
    more = f", and {listed(come)} take{'s' * (len(come) == 1)} part from now on" if come else ""
    return f"run {facts['run']} begins: {goes}{less}{more}"


def _refused(facts: Facts) -> str:
    who = facts.get("site") or f"a call from {facts.get('host', 'an unknown address')}"
    return f"{who} is refused: {facts['why']}"


def _gives_up(facts: Facts) -> str:
    missed = f": it waited for {listed(facts['missed'])} in vain" if facts["missed"] else ""
    why = f": {facts['why']}" if facts["why"] else ""
    return f"{facts['site']} gives up{missed}{why}"


_SENTENCES: dict[str, Callable[[Facts], str]] = {
    "joined": _joined,
    "began": lambda facts: f"run {facts['run']} begins: {listed(facts['sites'])}",
    "epoch": _epoch,
    "away": _away,
    "back": lambda facts: f"{facts['site']} is back{_from(facts)}",
    "left": _left,
    "lost": lambda facts: f"{facts['site']} is lost: {facts['why']}",
    "refused": _refused,
    "fault": lambda facts: f"run {facts['run']} cannot go on: {facts['why']}",
    "gives up": _gives_up,
    "not taken": lambda facts: f"{facts['site']} is not believed {facts['why']}",
    "invited": lambda facts: f"{facts['site']} is invited: it may call, and join the next run",
    "revoked": lambda facts: f"{facts['site']} is revoked: it may call no more",
}
