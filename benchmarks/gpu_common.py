"""What both benches of gpu.py share: the clock, rows that may fail, tables and files."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import outergrad as og

Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""What PyTorch, its CPU allocator and the CUDA libraries say."""


def objection(options: argparse.Namespace, methods: Collection[str]) -> str | None:
    """What makes the options impossible here, in one line."""
    unknown = set(options.methods or ()) - set(methods)
    if options.device == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here: use --device cpu, with small shapes"
    if unknown:
        return f"no method {min(unknown)!r}: there are {', '.join(methods)}"
    if options.tf32 and (options.device != "cuda" or options.dtype != "fp32"):
        return "--tf32 is for fp32 on CUDA: leave it out"
    if options.json and not options.json.absolute().parent.is_dir():
        return f"--json {options.json}: there is no such folder"
    return None


def set_up(options: argparse.Namespace) -> None:
    """Sets what holds for the whole process."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")


# -- times ------------------------------------------------------------------------------------


def times_ms(
    work: Callable[[], object], between: Callable[[], object], device: str, repeats: int
) -> list[float]:
    """Milliseconds of each call of work; between runs before each and is not counted.

    On CUDA, calls are queued without waiting, as in a training that runs ahead of its GPU, and
    events take the times there; the launches show where the CPU is slower than the GPU.
    """
    return (_cuda_ms if device == "cuda" else _host_ms)(work, between, repeats)


def _cuda_ms(
    work: Callable[[], object], between: Callable[[], object], repeats: int
) -> list[float]:
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        between()
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _host_ms(
    work: Callable[[], object], between: Callable[[], object], repeats: int
) -> list[float]:
    found = []
    for _ in range(repeats):
        between()
        began = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def summary(found_ms: Sequence[float]) -> Row:
    """Median and quartiles."""
    low, median, high = np.quantile(found_ms, [0.25, 0.5, 0.75]).tolist()
    return {"median_ms": median, "quartiles_ms": [low, high], "repeats": len(found_ms)}


# -- rows -------------------------------------------------------------------------------------


def attempt(figures: Callable[[], Row]) -> Row:
    """The figures, or why there are none: a row that fails must not lose the others."""
    try:
        return {"status": "ok", **figures()}
    except (RuntimeError, ValueError) as error:
        status = _status(error)
    free()  # only here: the error held on to the frames, and they to the tensors
    return {"status": status}


def _status(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    full = isinstance(error, torch.OutOfMemoryError) or any(w in said for w in _OUT_OF_MEMORY)
    return "out of memory" if full else f"failed: {said.splitlines()[0]}"


def free() -> None:
    """Gives unused memory back to the device; one that is broken for good must not end the run."""
    gc.collect()
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def is_timed(row: Row) -> bool:
    """Whether it has times that count."""
    return row["status"] == "ok" and "median_ms" in row


def median_text(row: Row) -> str:
    """The median, or why there is none."""
    return f"{row['median_ms']:.3f}" if is_timed(row) else row["status"]


def quartiles_text(row: Row) -> str:
    """First and third quartile."""
    return " - ".join(f"{q:.3f}" for q in row["quartiles_ms"]) if is_timed(row) else ""


def number_text(key: str, form: str) -> Callable[[Row], str]:
    """How a column shows a number that a row may lack."""
    return lambda row: "" if row.get(key) is None else format(row[key], form)


# -- what is shown and saved ------------------------------------------------------------------


class Progress:
    """A line on standard error now and then, for whoever waits; in place on a terminal."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._done = jobs, 0
        self._began = self._shown = time.perf_counter()

    def next(self, title: str) -> None:
        """Begins another job."""
        self._done += 1
        now = time.perf_counter()
        if now - self._shown >= 1:
            self._shown = now
            self._show(f"{now - self._began:6.0f} s  {self._done}/{self._jobs}  {title}")

    def end(self) -> None:
        """Clears the terminal's line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def table(columns: Columns, rows: Sequence[Row]) -> str:
    """Aligned columns, one line a row."""
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in cells)


def headline(options: argparse.Namespace) -> str:
    """Where and how it runs, for the line above the table."""
    found = machine(options.device)
    where = found["gpu"] or found["cpu"]
    return f"{where}, torch {found['torch']}, {options.dtype}{' as TF32' if options.tf32 else ''}"


def save(options: argparse.Namespace, checks: Sequence[str], rows: Sequence[Row]) -> None:
    """Writes the figures where `--json` says, with all that is needed to make them again."""
    if options.json:
        figures = {
            "command": shlex.join(["python", *sys.argv]),
            "git_commit": _git_commit(),
            "machine": machine(options.device),
            "options": vars(options),
            "checks": checks,
            "rows": rows,
        }
        options.json.write_text(json.dumps(figures, default=str, indent=1) + "\n")


def machine(device: str) -> Row:
    """Names and versions of what the figures depend on.

    It repeats part of `outergrad.launch.machine` on purpose, as the machine with the GPU may lack
    the extra `cli` that it needs.
    """
    gpu = device == "cuda"
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory if gpu else None,
        "driver": _said(*query) if gpu else None,
        "cuda": torch.version.cuda,
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "outergrad": og.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """The commit, with -dirty after it if files were changed since."""
    here = str(Path(__file__).parent)
    return _said("git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _said(*command: str) -> str | None:
    """What a program prints, None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
