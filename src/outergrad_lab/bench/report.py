"""Output of a benchmark: tables on the screen, a file and a plot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console

from outergrad.core.packages import require
from outergrad.launch.errors import CheckError, RecipeError
from outergrad.launch.links import ShapedLink
from outergrad_lab.bench.check import Check, check
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import LinkResult, Results
from outergrad_lab.bench.table import PAIRING, phases_lines, table

WIDTH = 110
"""Columns of the tables if the output is no terminal."""


class Report:
    """Reports on each link when it is done, and on all at the end.

    Args:
        path: File for the results. It is saved after each link, so that finished links are not
            lost.
        checked: Whether to compare the sessions' count of bytes with the interface's.
        verbose: Whether to show the phases of a step.
    """

    def __init__(self, path: Path, *, checked: bool, verbose: bool) -> None:
        """Makes the folder, so that an error shows at once."""
        self.path, self.checked, self.verbose = path, checked, verbose
        self.checks: list[Check] = []
        self.console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        with _writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise RecipeError(f"--out {path}: cannot be written")

    def begin(self, notes: Sequence[str]) -> None:
        """Prints caveats about the figures."""
        for note in notes:
            self.console.print(f"Note: {note}.", highlight=False, soft_wrap=True)

    def link_done(self, results: Results, link: LinkResult) -> None:
        """Prints the table of a link and saves all results so far."""
        self.console.print(table(results, link))
        if any(timing.ratio_to_ddp is not None for timing in link.timings):
            self.console.print(PAIRING, highlight=False)
        if self.verbose and link.timings:
            self.console.print(phases_lines(link.timings), highlight=False)
        if self.checked:
            self.checks += check(link, results.plan["sites"])
        with _writing(self.path):
            results.save(self.path)

    def end(self, results: Results) -> None:
        """Draws the plot and prints the paths of the files.

        Raises:
            CheckError: A session's count of bytes is wrong, or there is none.
        """
        for one in self.checks:
            self.console.print(str(one), highlight=False, soft_wrap=True)
        print(f"results: {self.path}{self._plot(results)}")
        if self.checked and not self.checks:
            raise CheckError("--check has nothing to compare: add dad or dense to --methods")
        wrong = [one for one in self.checks if not one.holds]
        if wrong:
            raise CheckError(f"--check: {len(wrong)} of {len(self.checks)} counts are wrong")

    def _plot(self, results: Results) -> str:
        try:
            require("matplotlib", "pandas", "seaborn")
        except ImportError as error:
            return f" (no plot: {error})"
        from outergrad_lab.bench.plot import plot

        path = self.path.with_suffix(".png")
        with _writing(path):
            plot(results, path)
        return f" and {path}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(f"--out {path}: {error.strerror}") from error


def result_file(out: Path, plan: Plan, links: Sequence[ShapedLink]) -> Path:
    """Returns the requested file, or a new one in the requested folder."""
    if out.suffix == ".json":
        return out
    joined = "_".join(link.name for link in links)
    until = "_until" if plan.until_loss else ""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    model = plan.workload.replace(":", "-")
    return out / f"{model}_{plan.sites}-sites_{joined}{until}_{now}.json"
