"""Results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outergrad._amounts import amount
from outergrad_lab.bench.results import Arrival, LinkResult, Results, Timing


def table(results: Results, result: LinkResult) -> Table:
    """Sets the methods side by side on one link."""
    shown = Table(
        title=title(results, result),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,  # every figure has its place in 80 columns
    )
    shown.add_column("method", no_wrap=True)
    headings, rows = arrival_rows(result) if result.arrivals else timing_rows(result)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    return shown


def title(results: Results, result: LinkResult) -> str:
    """Says what was measured, and where."""
    plan = results.plan
    link = "UNSHAPED, loopback" if result.loopback else f"link {result.link}"
    if result.probe:
        rate, rtt = result.probe.rate_bit_per_s / 1e6, 1e3 * result.probe.rtt_s
        link += f" (measured: {rate:,.1f} Mbit/s, {rtt:.1f} ms there and back)"
    return f"{plan['workload']}, {plan['sites']} sites, data {result.data}, {link}"


def timing_rows(result: LinkResult) -> tuple[list[str], list[tuple[str, ...]]]:
    """Headings and rows of step times."""
    ddp_bytes = next((t.sent_bytes for t in result.timings if t.method == "ddp"), None)
    headings = ["ms per\nstep", "quartiles", "x DDP", "sent per\nstep", "fewer\nbytes"]
    return headings, [_timing_row(timing, ddp_bytes) for timing in result.timings]


def _timing_row(timing: Timing, ddp_bytes: float | None) -> tuple[str, ...]:
    low, high = timing.quartiles_s
    fewer = ddp_bytes / timing.sent_bytes if ddp_bytes and timing.sent_bytes else None
    return (
        timing.method,
        _ms(timing.median_s),
        f"{_ms(low)} to {_ms(high)}",
        _times(timing.ratio_to_ddp, "{:.3f}"),
        amount(timing.sent_bytes),
        _times(fewer if timing.method != "alone" else None, "{:.1f} x"),
    )


def arrival_rows(result: LinkResult) -> tuple[list[str], list[tuple[str, ...]]]:
    """Headings and rows of times to the wanted loss."""
    ddp = next((arrival for arrival in result.arrivals if arrival.method == "ddp"), None)
    headings = ["test loss", "steps", "seconds", "x DDP", "sent per\nsite", "fewer\nbytes"]
    return headings, [_arrival_row(arrival, ddp) for arrival in result.arrivals]


def _arrival_row(arrival: Arrival, ddp: Arrival | None) -> tuple[str, ...]:
    compared = ddp if ddp and ddp.reached and arrival.reached else None
    fewer = compared.sent_bytes / arrival.sent_bytes if compared and arrival.sent_bytes else None
    return (
        arrival.method,
        f"{arrival.loss:.3f}" + ("" if arrival.reached else " missed"),
        f"{arrival.steps:,}",
        f"{arrival.seconds:,.1f}",
        _times(arrival.seconds / compared.seconds if compared else None, "{:.3f}"),
        amount(arrival.sent_bytes),
        _times(fewer if arrival.method != "alone" else None, "{:.1f} x"),
    )


def _ms(seconds: float) -> str:
    """Writes a time in ms, with a decimal where it says something."""
    return f"{1e3 * seconds:,.{0 if seconds >= 1 else 1}f}"


def _times(ratio: float | None, form: str) -> str:
    return "-" if ratio is None else form.format(ratio)


def phases_lines(timings: Sequence[Timing]) -> str:
    """Where the milliseconds of a step go, a line per method."""
    return "\n".join(
        f"  {timing.method}: "
        + ", ".join(
            f"{name.removesuffix('_s')} {1e3 * s:.1f}" for name, s in timing.phases_s.items()
        )
        for timing in timings
    )
