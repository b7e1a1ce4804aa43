"""Description of the machine and software that a benchmark ran on."""

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
    """Returns what a reader needs to repeat a benchmark: command, date, commit, machine, versions.

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
    """Returns the versions of outergrad, torch, Python and NumPy, by name."""
    return {
        "outergrad": outergrad.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
    }


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str | None:
    """Returns the commit of the source, with ``-dirty`` if it was changed; None if installed."""
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
    """Returns the name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
