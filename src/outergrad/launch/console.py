"""Output of the command line on the error stream: progress bars, and errors as one line."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from outergrad._printable import printable
from outergrad.launch.errors import CheckError, RecipeError, SiteError

T = TypeVar("T")
_LAYOUT = "\n\t"


def step_bars(*, shown: bool) -> Progress:
    """Progress bars that count steps, on the error stream."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not shown,
    )


def download_bars() -> Progress:
    """Progress bars that count bytes, on the error stream if it is a terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def count(bars: Progress, task: TaskID, items: Iterable[T]) -> Iterator[T]:
    """Yields the items and advances a bar by one for each."""
    for item in items:
        bars.advance(task)
        yield item


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends this process with one line where a recipe fails.

    Of the processes that torchrun starts on a machine, only one reports a mistake that all of them
    have noticed.
    """
    try:
        yield
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(str(error), below_a_bar=False)
        _leave(2)
    except SiteError as error:
        say(str(error))
        _leave(1)
    except CheckError as error:
        say(str(error), below_a_bar=False)
        _leave(1)
    except KeyboardInterrupt:
        say("interrupted")
        _leave(130)
    else:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _leave(0)


def _leave(code: int) -> None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(code)
    leave_at_once(code)


def leave_at_once(code: int) -> None:
    """Ends this process without Python's own shutdown.

    During that shutdown a gloo thread that frees a tensor would abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(message: str, *, below_a_bar: bool = True) -> None:
    """Prints one line on the error stream, below a progress bar that may be unfinished."""
    console = Console(stderr=True)
    console.show_cursor()
    if below_a_bar and console.is_terminal:
        console.line()
    console.out(f"outergrad: {printable(message, keep=_LAYOUT)}", highlight=False)
