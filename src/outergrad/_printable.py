"""Text of others that may be shown on a terminal."""

from __future__ import annotations

import unicodedata

_STEERING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of characters that nobody sees: control, format, surrogate, separators of lines."""


def printable(text: str, keep: str = "") -> str:
    """The text with a mark in the place of each character that would steer a terminal.

    For names and messages of files and other sites: an escape sequence in them could hide what
    is written, or type into the terminal.

    Args:
        text: Anything.
        keep: Control characters that stay, as a line break.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in keep or unicodedata.category(c) not in _STEERING else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
