"""Aims of attacks: the data itself, its tokens, its labels, or who was there."""

from __future__ import annotations

THINGS = ("rows", "texts", "inputs", "patches", "images", "tokens", "labels", "members")
"""First words of the names of all attacks."""

DATA = ("rows", "texts", "inputs", "patches", "images")
"""Those of attacks that give back the data itself."""


def thing_of(attack: str) -> str:
    """Returns the one of `THINGS` that an attack is after: the first word of its name.

    Raises:
        ValueError: An attack is named by something else, which no table would count.
    """
    thing = attack.partition(" ")[0]
    if thing not in THINGS:
        raise ValueError(
            f"attack {attack!r}: begin its name with one of {', '.join(THINGS)}, or add a word "
            f"to outergrad.tools.audit.things"
        )
    return thing


def is_data(attack: str) -> bool:
    """True if an attack gives back the data itself."""
    return thing_of(attack) in DATA
