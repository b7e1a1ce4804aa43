"""What an experiment consists of: tasks, each with a result of its own."""

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
    """What a task runs in.

    Attributes:
        data_dir: Folder of the data sets.
        steps: Is told how many steps the task has, before the first.
        advance: Is told that one is done.
    """

    data_dir: Path
    steps: Callable[[int], None] = lambda count: None
    advance: Callable[[], None] = lambda: None


class Work(Protocol):
    """What a kind of task does: a dataclass whose fields are the settings of the kind.

    Settings that cannot be are refused by a `RecipeError` when it is made, before anything runs.
    """

    def run(self, context: Context) -> dict[str, Any]:
        """Does it and returns plain values.

        Raises:
            RecipeError: The user must mend something.
            SiteError: A site failed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to run.

    Attributes:
        kind: A key of `KINDS`.
        settings: What is special about it.
    """

    kind: str
    settings: Settings = field(hash=False)

    @property
    def key(self) -> str:
        """Names its result: other settings, another key."""
        text = json.dumps([self.kind, self.settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """Its settings in a line."""
        return " ".join(f"{name}={value}" for name, value in self.settings.items())
