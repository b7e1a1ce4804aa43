"""Pages of runs that no training wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from made_up_run import events, write_run
from outergrad._event_lines import line_of
from outergrad.events import Scalars
from outergrad.report import write_page

LONG = "transformer.encoder.blocks.{}.attention.output_projection.weight"


def write_part(folder: Path, *kinds: str) -> Path:
    """A run of which only events of some kinds were recorded."""
    return _write(folder, lambda entry: entry if entry["event"] in kinds else None)


def write_bare(folder: Path) -> Path:
    """A run of which nothing optional was measured."""
    optional = ("effective_rank", "singular_values", "relative_error", "residual_norm", "cosine")
    return _write(folder, lambda entry: {k: v for k, v in entry.items() if k not in optional})


def write_wild(folder: Path) -> Path:
    """A run that diverges, of layers with names that look like markup."""
    folder = _write(folder, _wild)
    values = {"loss": math.nan, "</script><script>alert(1)</script>": math.inf}
    last = Scalars(rank=0, step=40, time=1.7e9, values=values)
    with (folder / "site-0.jsonl").open("a") as file:
        file.write(json.dumps(line_of(last)) + "\n")
    return folder


def _wild(entry: dict) -> dict:
    if entry["event"] != "layer":
        return entry
    strange = {"layer": f"<b>{entry['layer']}</b>", "cosine": math.nan, "effective_rank": math.inf}
    return entry | strange | {"singular_values": [math.inf, 0.0, math.nan], "sent_bytes": 0}


def write_deep(folder: Path, layers: int = 20) -> Path:
    """A run of many layers with long names."""
    folder.mkdir(parents=True)
    with (folder / "site-0.jsonl").open("w") as file:
        for event in events(0, 1, 60, 10, 1.7e9):
            entry = line_of(event)
            if entry.get("layer") == "head.weight":
                for k in range(layers):
                    file.write(json.dumps(entry | {"layer": LONG.format(k)}) + "\n")
            elif entry["event"] != "layer":
                file.write(json.dumps(entry) + "\n")
    return folder


def _write(folder: Path, change: Callable[[dict], dict | None]) -> Path:
    folder.mkdir(parents=True)
    changed = (change(line_of(event)) for event in events(0, 1, 40, 10, 1.7e9))
    kept = [json.dumps(entry) for entry in changed if entry is not None]
    (folder / "site-0.jsonl").write_text("\n".join(kept) + "\n")
    return folder


RUNS: dict[str, Callable[[Path], Path]] = {
    "whole": write_run,
    "one step": lambda folder: write_run(folder, steps=1),
    "one site": lambda folder: write_run(folder, sites=1),
    "run alone": lambda folder: write_part(folder, "run"),
    "layers alone": lambda folder: write_part(folder, "layer"),
    "steps alone": lambda folder: write_part(folder, "step"),
    "scalars alone": lambda folder: write_part(folder, "scalars"),
    "bare": write_bare,
    "wild": write_wild,
    "deep": write_deep,
}
"""Ways to write a run into a folder."""


def page_of(folder: Path, *names: str) -> Path:
    """A page of such runs."""
    page = folder / "report.html"
    write_page([RUNS[name](folder / name.replace(" ", "-")) for name in names], page)
    return page
