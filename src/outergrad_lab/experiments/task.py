"""Tasks of an experiment, each with a result of its own."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Settings = Mapping[str, Any]
"""Plain values, as YAML and JSON have them."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Surroundings in which a task runs.

    Attributes:
        data_dir: Folder of the data sets.
        steps: Called with the number of steps of the task, before the first.
        advance: Called when a step is done.
    """

    data_dir: Path
    steps: Callable[[int], None] = lambda count: None
    advance: Callable[[], None] = lambda: None


class Work(Protocol):
    """Work of a kind of task: a dataclass whose fields are the settings of the kind.

    Its constructor raises a `RecipeError` for impossible settings, before anything runs.
    """

    def run(self, context: Context) -> dict[str, Any]:
        """Does the work and returns plain values.

        Raises:
            RecipeError: The user made a mistake.
            SiteError: A site failed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of an experiment.

    Attributes:
        kind: A key of `KINDS`.
        settings: Settings of the task.
    """

    kind: str
    settings: Settings = field(hash=False)

    @property
    def key(self) -> str:
        """Key of its result: other settings give another key."""
        text = json.dumps([self.kind, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items())
