"""Results of an experiment in a file of JSON lines, one per task."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from outergrad._event_lines import GrowingFile, parsed
from outergrad._version import __version__
from outergrad.launch.errors import RecipeError
from outergrad.launch.machine import cores, processor
from outergrad.record.jsonl import open_to_append
from outergrad_lab.experiments.task import Task

Result = dict[str, Any]


class Store:
    """Folder of an experiment.

    Args:
        folder: The folder; its tables and figures lie here, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from running the same tasks.

        Raises:
            RecipeError: Another process runs them, or the folder cannot be written to.
        """
        lock = FileLock(self.folder / "results.lock", timeout=0)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = lock.acquire()
        except Timeout:
            raise RecipeError(f"--out {self.folder}: another process runs it there") from None
        except OSError as error:
            raise RecipeError(f"--out {self.folder}: {error.strerror}") from error
        with held:
            yield

    def results(self, tasks: Sequence[Task]) -> list[Result]:
        """Returns the results of those tasks that are done, in the order of tasks."""
        found = {result["key"]: result for result in self._read()}
        return [found[task.key] for task in tasks if task.key in found]

    def missing(self, tasks: Sequence[Task]) -> list[Task]:
        """Returns the tasks without a result."""
        found = {result["key"] for result in self._read()}
        return [task for task in tasks if task.key not in found]

    def add(self, task: Task, values: Result) -> None:
        """Stores the result of a task, with versions, machine and time.

        Raises:
            RecipeError: The folder cannot be written to.
        """
        about = {
            "outergrad": __version__,
            "torch": str(torch.__version__),
            "machine": f"{processor()}, {cores()} cores",
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        own = {"key": task.key, "kind": task.kind, "settings": dict(task.settings)}
        line = json.dumps(_plain({**own, **values, **about}), allow_nan=False)
        try:
            with open_to_append(self._path) as file:
                file.write(line + "\n")
        except OSError as error:
            raise RecipeError(f"--out {self.folder}: {error.strerror}") from error

    def _read(self) -> list[Result]:
        if not self._path.is_file():
            return []
        file = GrowingFile(self._path)
        found = map(parsed, [*file.lines()[0], file.rest])
        return [line for line in found if line and _is_whole(line)]


def _is_whole(result: Result) -> bool:
    return isinstance(result.get("key"), str) and "seconds" in result


def _plain(value: Any) -> Any:
    """Rounds numbers to ten digits, and replaces infinity and NaN by None."""
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
