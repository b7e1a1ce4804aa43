"""Results of `outergrad bench` as Markdown, each table with the command that makes it.

python benchmarks/tables.py benchmarks/results/*.json
python benchmarks/tables.py --grid benchmarks/results/grid/*.json    # one line per file

In a grid a ratio is bold where it is more than 1.02 with 97.5%. Below the table stands in how many
settings a method takes longer than a limit allows, by the median and with 97.5%.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratios import Ratio

_OVER_DDP, _OVER_BEST = 1.02, 1.05
"""What "not slower" allows: than DDP, and than the best of the methods that were chosen among."""

_ARMS = {"auto": ("dense", "dad"), "auto:among=rank-dad-4": ("dense", "dad", "rank-dad-4")}


def main() -> None:
    """Prints the tables of every file that is named."""
    if sys.argv[1] == "--grid":
        runs = [json.loads(Path(name).read_text()) for name in sys.argv[2:]]
        print("\n".join([*grid(runs), "", *verdicts(runs)]))
        return
    for name in sys.argv[1:]:
        results = json.loads(Path(name).read_text())
        arrived = any(link["arrivals"] for link in results["links"])
        print("\n".join(arrivals(results) if arrived else timings(results)))
        print(f"\n    {results['about']['command']}\n")


def timings(results: dict[str, Any]) -> list[str]:
    """One row per method; for each link milliseconds and their multiple of DDP's."""
    links = results["links"]
    heads = [f"{link_name(link)}, ms [quartiles] | x DDP" for link in links]
    lines = table_head(["", *heads, "bytes per step", "fewer than DDP"])
    last = {timing["method"]: timing for timing in links[-1]["timings"]}
    for method, timing in last.items():
        cells = [timing_cells(link, method) for link in links]
        fewer = ratio(last.get("ddp"), timing, "sent_bytes") if method != "alone" else "-"
        lines.append(f"| {method} | {' | '.join(cells)} | {timing['sent_bytes']:,.0f} | {fewer} |")
    return lines


def timing_cells(link: dict[str, Any], method: str) -> str:
    """The two cells of a method on a link."""
    found = next(timing for timing in link["timings"] if timing["method"] == method)
    low, high = (milliseconds(seconds) for seconds in found["quartiles_s"])
    times = found["ratio_to_ddp"]
    relative = "-" if times is None else f"{times:.2f}" if times >= 0.1 else f"{times:.3f}"
    return f"{milliseconds(found['median_s'])} [{low}, {high}] | {relative}"


def arrivals(results: dict[str, Any]) -> list[str]:
    """One row per method; for each link steps, seconds and bytes to the loss."""
    links = results["links"]
    heads = [f"{link_name(link)}: steps | seconds | sent, MB | fewer than DDP" for link in links]
    lines = table_head(["", *heads])
    for method in [arrival["method"] for arrival in links[0]["arrivals"]]:
        cells = [arrival_cells(link, method) for link in links]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def arrival_cells(link: dict[str, Any], method: str) -> str:
    """The four cells of a method on a link."""
    all_of = {arrival["method"]: arrival for arrival in link["arrivals"]}
    found = all_of[method]
    steps = f"{found['steps']:,}" if found["reached"] else f"not in {found['steps']:,}"
    fewer = ratio(all_of.get("ddp"), found, "sent_bytes") if method != "alone" else "-"
    return f"{steps} | {found['seconds']:,.1f} | {found['sent_bytes'] / 1e6:,.1f} | {fewer}"


def grid(runs: list[dict[str, Any]]) -> list[str]:
    """One row per run of one link: DDP's milliseconds, and the multiple of it of every method."""
    methods = list(dict.fromkeys(m for run in runs for m in run["plan"]["methods"] if m != "ddp"))
    rows = [(sites_and_link(run), *grid_cells(run, methods)) for run in runs]
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return table_head(["link", "workload", "DDP, ms", *methods]) + lines


def sites_and_link(run: dict[str, Any]) -> str:
    """The heading of the rows of one link."""
    link, sites = run["links"][0], run["plan"]["sites"]
    return f"{link_name(link)}{f', {sites} sites' if sites > 2 else ''}"


def grid_cells(run: dict[str, Any], methods: list[str]) -> list[str]:
    """Of a workload on its link."""
    of = {timing["method"]: timing for timing in run["links"][0]["timings"]}
    over = {m: Ratio.between(of[m]["rounds_s"], of["ddp"]["rounds_s"]) for m in methods if m in of}
    cells = {m: f"{one.median:.3f}" for m, one in over.items()}
    bold = {m: f"**{cell}**" for m, cell in cells.items() if over[m].lower > _OVER_DDP}
    told = [bold.get(m, cells.get(m, "")) for m in methods]
    return [run["plan"]["workload"], milliseconds(of["ddp"]["median_s"]), *told]


def verdicts(runs: list[dict[str, Any]]) -> Iterator[str]:
    """In how many settings a method takes longer than it should, of methods that were measured."""
    asked: list[tuple[str, tuple[str, ...], float]] = [
        *((method, ("ddp",), _OVER_DDP) for method in ("ddp-again", "dense", *_ARMS)),
        *((method, arms, _OVER_BEST) for method, arms in _ARMS.items()),
        ("rank-dad-4", ("powersgd-4",), 1.0),
    ]
    for method, others, limit in asked:
        if any({method, *others} <= {*run["plan"]["methods"]} for run in runs):
            yield verdict(runs, method, others, limit)


def verdict(runs: list[dict[str, Any]], method: str, others: tuple[str, ...], limit: float) -> str:
    """In how many settings it takes longer than the limit allows, and surely where."""
    found = {
        f"{run['plan']['workload']} {sites_and_link(run)}": over_best(run, method, others)
        for run in runs
        if {method, *others} <= {*run["plan"]["methods"]}
    }
    longer = [name for name, one in found.items() if one.median > limit]
    surely = [f"{name} {one}" for name, one in found.items() if one.lower > limit]
    named = f": {'; '.join(surely)}" if surely else ""
    return (
        f"{method} over {limit} x the best of {', '.join(others)}: by the median in {len(longer)} "
        f"of {len(found)}, with 97.5% in {len(surely)}{named}"
    )


def over_best(run: dict[str, Any], method: str, others: tuple[str, ...]) -> Ratio:
    """A method beside that of the others which it is slowest beside."""
    of = {timing["method"]: timing["rounds_s"] for timing in run["links"][0]["timings"]}
    ratios = [Ratio.between(of[method], of[other]) for other in others]
    return max(ratios, key=lambda one: one.median)


def table_head(cells: list[str]) -> list[str]:
    """The heading, with as many columns as its cells have between them."""
    text = f"| {' | '.join(cells)} |"
    return [text, "|---" * (text.count("|") - 1) + "|"]


def link_name(link: dict[str, Any]) -> str:
    """The link, for a heading."""
    return (
        "loopback" if link["loopback"] else "unshaped" if link["link"] == "none" else link["link"]
    )


def milliseconds(seconds: float) -> str:
    """Three digits at least."""
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def ratio(ddp: dict[str, Any] | None, found: dict[str, Any], key: str) -> str:
    """By how much DDP has more."""
    return f"{ddp[key] / found[key]:.1f} x" if ddp and found[key] else "-"


if __name__ == "__main__":
    main()
