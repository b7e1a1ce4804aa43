"""Report of what a session has released so far, in figures and in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from outergrad._printable import first_few
from outergrad.core.packages import missing
from outergrad.private.ledger import Ledger
from outergrad.private.observers import Observer


@dataclass(frozen=True)
class PrivacySpent:
    """Report of what a session has released so far: `print(session.privacy())`.

    Attributes:
        epsilon: ε by observer ("model", "site", "hub"), by the ledger's accountant; empty where
            dp-accounting is not installed.
        delta: δ.
        steps: released steps.
        notes: what is not covered, in words.
        table: the ledger's table.
    """

    epsilon: Mapping[Observer, float]
    delta: float
    steps: int
    notes: tuple[str, ...]
    table: str

    def __str__(self) -> str:
        return "\n".join([self.table, *self.notes])


def spent(ledger: Ledger, noise: float, local: Collection[str]) -> PrivacySpent:
    """Returns what a ledger tells of a session.

    Args:
        ledger: of the session.
        noise: σ of its steps.
        local: parameters that each site trains for itself.

    Raises:
        ValueError: ε is not to be had by the ledger's accountant.
    """
    known = missing("dp_accounting") is None
    whom = ledger.observers if known else ()
    epsilon: dict[Observer, float] = {who: ledger.epsilon(who) for who in whom}
    notes = (_of_noise(noise), _of_local(local))
    told = tuple(note for note in notes if note)
    return PrivacySpent(epsilon, ledger.delta, ledger.steps, told, str(ledger))


def _of_noise(noise: float) -> str:
    return "" if noise else "noise=0: gradients are clipped alone, and nothing is promised"


def _of_local(names: Collection[str]) -> str:
    if not names:
        return ""
    told = first_few(list(names))
    return f"not covered: {told}, trained at this site alone, without noise: do not publish"
