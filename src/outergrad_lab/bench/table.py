"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod
from rich.table import Table

from outergrad._amounts import amount, milliseconds
from outergrad_lab.bench.results import Arrival, LinkResult, Results, Timing

Row = dict[str, str]
"""Cells by the heading of their column."""


def table(results: Results, result: LinkResult) -> Table:
    """Returns a table of the methods on one link."""
    shown = Table(
        title=title(results, result),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,  # so that all figures fit in 80 columns
    )
    rows = arrival_rows(result) if result.arrivals else timing_rows(result)
    for heading in rows[0]:
        folds = heading == "method"  # a long name is wrapped, so that the figures fit
        justify: JustifyMethod = "left" if folds else "right"
        shown.add_column(heading, justify=justify, no_wrap=not folds, overflow="fold")
    for row in rows:
        shown.add_row(*row.values())
    return shown


def title(results: Results, result: LinkResult) -> str:
    """Returns a line that says what was measured, and where."""
    plan = results.plan
    link = "UNSHAPED, loopback" if result.loopback else f"link {result.link}"
    if result.probe:
        rate, rtt = result.probe.rate_bit_per_s / 1e6, 1e3 * result.probe.rtt_s
        link += f" (measured: {rate:,.1f} Mbit/s, {rtt:.1f} ms there and back)"
    return f"{plan['workload']}, {plan['sites']} sites, data {result.data}, {link}"


PAIRING = "x DDP: the median step of a round by DDP's in that round; of all rounds the median."


def timing_rows(result: LinkResult) -> list[Row]:
    """Returns step times, a row per method."""
    ddp_bytes = next((t.sent_bytes for t in result.timings if t.method == "ddp"), None)
    return [_timing_row(timing, ddp_bytes) for timing in result.timings]


def _timing_row(timing: Timing, ddp_bytes: float | None) -> Row:
    low, high = timing.quartiles_s
    return {
        "method": timing.method,
        "ms per\nstep": milliseconds(timing.median_s),
        "quartiles": f"{milliseconds(low)} to {milliseconds(high)}",
        "x DDP": "-" if timing.ratio_to_ddp is None else f"{timing.ratio_to_ddp:.3f}",
        "sent per\nstep": amount(timing.sent_bytes),
        "fewer\nbytes": _fewer(timing, ddp_bytes),
    }


def arrival_rows(result: LinkResult) -> list[Row]:
    """Returns times to the wanted loss, a row per method; compares only those that reached it."""
    ddp = next((a for a in result.arrivals if a.method == "ddp" and a.reached), None)
    return [_arrival_row(one, ddp if one.reached else None) for one in result.arrivals]


def _arrival_row(arrival: Arrival, ddp: Arrival | None) -> Row:
    return {
        "method": arrival.method,
        "test loss": f"{arrival.loss:.3f}" + ("" if arrival.reached else " missed"),
        "steps": f"{arrival.steps:,}",
        "seconds": f"{arrival.seconds:,.1f}",
        "x DDP": f"{arrival.seconds / ddp.seconds:.3f}" if ddp else "-",
        "sent per\nsite": amount(arrival.sent_bytes),
        "fewer\nbytes": _fewer(arrival, ddp.sent_bytes if ddp else None),
    }


def _fewer(one: Timing | Arrival, ddp_bytes: float | None) -> str:
    if not ddp_bytes or not one.sent_bytes or one.method == "alone":
        return "-"
    return f"{ddp_bytes / one.sent_bytes:.1f} x"


def phases_lines(timings: Sequence[Timing]) -> str:
    """Formats the milliseconds of each phase of a step, a line per method."""
    return "\n".join(f"  {timing.method}: {_phases(timing)}" for timing in timings)


def _phases(timing: Timing) -> str:
    phases = timing.phases_s.items()
    return ", ".join(f"{name.removesuffix('_s')} {1e3 * s:.1f}" for name, s in phases)
