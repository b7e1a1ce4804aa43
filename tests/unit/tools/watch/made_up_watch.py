"""Made-up runs as `outergrad watch` would know them."""

from __future__ import annotations

from pathlib import Path

from made_up_run import START
from outergrad.core.run_figures import Watched
from outergrad.tools.watch.picture import View, picture


def view(
    width: int = 80, height: int | None = 24, steps: int = 200, later_s: float = 1.0, foreign=0
) -> View:
    return View(Path("runs/mlp"), foreign, START + steps / 10 + later_s, width, height)


def drawn(run: Watched, **about) -> list[str]:
    """The lines of the picture."""
    return picture(run, view(**about)).plain.split("\n")
