"""Checks of `og.OnDrift` against method and settings: a problem and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outergrad.drift.on_drift import OnDrift
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.inspect import Inspection


def drift_of(method: Any, inspection: Inspection, **settings: Any) -> OnDrift | None:
    """Returns the drift on which the sites exchange; None if they do not wait for one.

    Args:
        method: the user's.
        inspection: of the model.
        **settings: those of the user that a drift does not go with, by name.

    Raises:
        ValueError: sites cannot exchange on drift here.
    """
    paces = inspection.every.values()
    found = list(dict.fromkeys(k for k in paces if isinstance(k, OnDrift)))
    if isinstance(method, LocalSteps) and isinstance(method.k, OnDrift):
        found.append(method.k)
        if settings["tap"] is not None:
            raise ValueError(
                "og.OnDrift with og.LocalSteps: a tap is told how many steps are between two "
                "exchanges, which nobody knows before: leave tap= out"
            )
    first = next(_problems(found, settings), None) if found else None
    if first is not None:
        raise ValueError(f"og.OnDrift {first}")
    return found[0] if found else None


def _problems(found: list[OnDrift], settings: dict[str, Any]) -> Iterator[str]:
    if len(found) > 1:
        yield (
            f"is given twice, as {found[0]!r} and {found[1]!r}: a site has one vote, so give all "
            f"parts of the model the same"
        )
    if settings["mesh"] is not None:
        yield "is for sites of one rank, as the ranks of a site may see other drifts: leave it out"
    if settings["transform"] is not None:
        yield (
            f"tells the other sites when this site's data change, and "
            f"transform={settings['transform']!r} does not change that: leave one of them out"
        )
