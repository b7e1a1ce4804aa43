"""Text made fit for a terminal: safe where it is from files and other sites, and short."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of invisible characters: control, format, surrogate, line separators."""


_SHOWN = 4


def first_few(names: Sequence[str]) -> str:
    """Lists the first names, and tells how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def printable(text: str, keep: str = "") -> str:
    """Returns the text with a mark in place of each character that could control a terminal.

    For names and messages from files and other sites: an escape sequence in them could hide text
    or type into the terminal.

    Args:
        text: Anything.
        keep: Control characters that stay, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _STEERING else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
