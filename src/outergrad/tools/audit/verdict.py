"""Verdict of an audit in words: what came back, by whom, and what to change."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.tools.audit.audit import MASKED, PART, SUM, Seen
from outergrad.tools.audit.things import is_data

MUCH, SOME = 0.5, 0.1
"""Share beyond a guess from which on an attack has found most, or something."""


def verdict(seen: Sequence[Seen]) -> list[str]:
    """Returns one sentence per method, and then what to change."""
    methods = dict.fromkeys(one.method for one in seen)
    told = [_about(method, [one for one in seen if one.method == method]) for method in methods]
    return [*told, *_advice(seen)]


def _about(method: str, seen: Sequence[Seen]) -> str:
    refused = [one for one in seen if one.refused]
    if len(refused) == len(seen):
        return f"{method}: does not go with this model."
    parts = [one for one in seen if one.observer == PART]
    data = _rows_up_to(parts, MUCH, data=True)
    if data:
        return f"{method}: {data[-1][1]} in batches of up to {data[-1][0]}{_beyond(seen)}."
    some = _rows_up_to(parts, SOME)
    if some:
        return f"{method}: no data came back, but {some[-1][1]} (batches of up to {some[-1][0]})."
    return f"{method}: nothing came back beyond chance."


def _rows_up_to(seen: Sequence[Seen], least: float, *, data: bool = False) -> list[tuple[int, str]]:
    """Returns batch size and figure of the best attacks that found at least such a share."""
    found = []
    for one in sorted(seen, key=lambda s: s.rows):
        fitting = [f for f in one.findings if f.share >= least and (is_data(f.attack) or not data)]
        if fitting:
            best = max(fitting, key=lambda f: f.share)
            found.append((one.rows, f"{best.figure} ({best.attack})"))
    return found


def _beyond(seen: Sequence[Seen]) -> str:
    """Says whether a sum of two sites gave data back, too."""
    sums = _rows_up_to([one for one in seen if one.observer == SUM], MUCH, data=True)
    if not any(one.observer == SUM for one in seen):
        return ", to every other site"
    told = f"of sums over two sites up to batches of {sums[-1][0]}" if sums else "not of sums"
    return f", to whoever sees a site's own part; {told}"


def _advice(seen: Sequence[Seen]) -> list[str]:
    whole = [one for one in seen if one.findings and one.observer != MASKED]
    leaky = [one for one in whole if any(f.share >= MUCH for f in one.findings)]
    told = {(one.method, one.rows) for one in leaky}  # though of a sum nothing may have come back
    tight = [one for one in whole if (one.method, one.rows) not in told]
    advice = []
    if any(is_data(f.attack) and f.share >= MUCH for one in leaky for f in one.findings):
        advice.append(
            "What to change: larger batches or every=k first; sums over more sites, that nobody "
            "adds up in the clear (og.Star(blind=True)); og.Private for a promise."
        )
    elif leaky:
        advice.append(
            "What to change: what came back is labels or membership, which sums over more sites "
            "and og.Private lower."
        )
    if tight:
        names = ", ".join(dict.fromkeys(f"{one.method} at {one.rows}" for one in tight))
        advice.append(f"Least came back of: {names}.")
    advice.append(
        "An attack that finds nothing proves nothing: others exist, and only og.Private promises."
    )
    return advice
