"""Made-up runs as `outergrad watch` would know them."""

from __future__ import annotations

from pathlib import Path

import made_up_run
from outergrad.tools.watch.picture import picture
from outergrad.tools.watch.state import Watched
from outergrad.tools.watch.view import View

START = 1.7e9


def watched(sites: int = 2, steps: int = 200, silent: dict[int, int] | None = None) -> Watched:
    """A run; the sites that fell silent did so after so many steps."""
    run = Watched()
    for rank in range(sites):
        count = (silent or {}).get(rank, steps)
        for event in made_up_run.events(rank, sites, count, 10, START):
            run.take(event, heard=START + count / 10)
    return run


def view(
    width: int = 80, height: int | None = 24, steps: int = 200, later_s: float = 1.0, foreign=0
) -> View:
    return View(Path("runs/mlp"), foreign, START + steps / 10 + later_s, width, height)


def drawn(run: Watched, **about) -> list[str]:
    """The lines of the picture."""
    return picture(run, view(**about)).plain.split("\n")
