"""What a task gives back: what it found, and on what and with what it ran."""

from __future__ import annotations

import sys
import time
from typing import Any

from outergrad.bench.machine import describe
from outergrad.reproduce.task import Settings


def outcome(kind: str, settings: Settings, began: float, found: dict[str, Any]) -> dict[str, Any]:
    """Puts a result together.

    Args:
        kind: A key of `KINDS`.
        settings: Of the task, with those that were left to their defaults.
        began: When it did, on `time.perf_counter`.
        found: What is special about the kind.
    """
    about = describe(sys.argv)
    machine, versions = about["machine"], about["versions"]
    return {
        "kind": kind,
        "settings": dict(settings),
        **found,
        "seconds": time.perf_counter() - began,
        "outergrad": versions["outergrad"],
        "torch": versions["torch"],
        "machine": f"{machine['processor']}, {machine['cores']} cores",
        "finished": about["date"],
    }
