"""Text from files and other sites, made safe to print on a terminal."""

from __future__ import annotations

import unicodedata

_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of invisible characters: control, format, surrogate, line separators."""


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
