"""On what and with what a benchmark ran."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

import outergrad


def describe(command: list[str]) -> dict[str, Any]:
    """What a reader needs to repeat a benchmark.

    Args:
        command: The command line that was given.
    """
    return {
        "command": shlex.join([Path(command[0]).name, *command[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "processor": processor(),
            "cores": cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What is installed, by name."""
    return {
        "outergrad": outergrad.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def cores() -> int:
    """Processor cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """The commit of the source, with ``-dirty`` where it was changed since; None if installed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The name of its model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
