"""From where a run is looked at, and how a line of it is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from outergrad._printable import printable

DIM = "bright_black"
LABEL = 9


@dataclass(frozen=True)
class View:
    """From where a run is looked at.

    Attributes:
        path: the folder of the run.
        foreign: lines in its files that are no events.
        now: seconds since 1970.
        width: columns of the picture.
        height: lines that it may have; None for as many as there are.
    """

    path: Path
    foreign: int
    now: float
    width: int
    height: int | None


def labelled(label: str, text: Text) -> Text:
    """A line behind its label."""
    return Text.assemble((label.ljust(LABEL), "dim"), text)


def dotted(*figures: str | tuple[str, str] | Text | None) -> Text:
    """Figures with dots between them; None and "" are left out."""
    dot = Text.assemble((" · ", DIM))
    return dot.join(Text.assemble(figure) for figure in figures if figure)


def rule(view: View) -> Text:
    """Between two parts of the picture."""
    return Text("─" * (view.width - 2), DIM)


def sides(left: Text, right: Text, width: int) -> Text:
    """One text at the left end of a line and one at the right; the left one gives way."""
    left = left.copy()
    left.truncate(max(0, width - 4 - len(right)), overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def fitted(line: Text, width: int) -> Text:
    """With a margin at the left, and an end that says so where it is cut off.

    Names in it come from files: nothing in them reaches the terminal but what can be seen.
    """
    fitted = Text.assemble(" ", line)
    fitted.plain = printable(fitted.plain)  # of the same length, so that colours stay
    fitted.truncate(width, overflow="ellipsis")
    return fitted
