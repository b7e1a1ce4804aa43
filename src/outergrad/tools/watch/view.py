"""View of a run, and layout of its lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from outergrad._printable import printable

DIM = "bright_black"
LABEL = 9


@dataclass(frozen=True)
class View:
    """Size and time for which a picture is drawn.

    Attributes:
        path: folder of the run.
        foreign: number of lines in its files that are not events.
        now: seconds since 1970.
        width: columns of the picture.
        height: maximum number of lines; None for no limit.
    """

    path: Path
    foreign: int
    now: float
    width: int
    height: int | None


def labelled(label: str, text: Text) -> Text:
    """Returns a line that starts with its label."""
    return Text.assemble((label.ljust(LABEL), "dim"), text)


def dotted(*figures: str | tuple[str, str] | Text | None) -> Text:
    """Joins figures with dots; None and "" are left out."""
    dot = Text.assemble((" · ", DIM))
    return dot.join(Text.assemble(figure) for figure in figures if figure)


def rule(view: View) -> Text:
    """Returns a line between two parts of the picture."""
    return Text("─" * (view.width - 2), DIM)


def sides(left: Text, right: Text, width: int) -> Text:
    """Returns a line with text at both ends; the left one is cut if there is no room."""
    left = left.copy()
    left.truncate(max(0, width - 4 - len(right)), overflow="ellipsis", pad=True)
    return Text.assemble(left, "  ", right)


def fitted(line: Text, width: int) -> Text:
    """Returns a line with a left margin, and an ellipsis if it is cut.

    Names in it come from files, hence only printable characters reach the terminal.
    """
    fitted = Text.assemble(" ", line)
    fitted.plain = printable(fitted.plain)  # of the same length, so that colours stay
    fitted.truncate(width, overflow="ellipsis")
    return fitted
