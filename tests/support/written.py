"""The Markdown of README and docs/, in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from places import REPOSITORY

ALL = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
_FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        place: page and line, for a message.
        language: its tag.
        code: what stands in it.
        runs: whether no comment above says that it cannot run here.
    """

    place: str
    language: str
    code: str
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    """Of a page, from top to bottom."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        runs = not _NOT_RUN.search(text[: found.start()])
        yield Block(f"{page.name}:{line}", found[1], found[2], runs)


def prose(page: Path) -> str:
    """What is no code."""
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", page.read_text()))
