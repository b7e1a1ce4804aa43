"""Tables of a plan for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf, isinf

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from outergrad._amounts import milliseconds, times
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.forecast import HIGHEST_BIT_PER_S, Forecast
from outergrad.tools.plan.layers import LayerBytes, LayerPlan
from outergrad.tools.plan.measure import Planned

_HEADINGS = (
    "exact",
    "kB sent\nper step",
    "fewer\nbytes",
    "mes-\nsages",
    "com-\nputing",
    "wait-\ning",
    "step,\nms",
    "x\ndense",
)
_LAYERS = (
    "kB that a site sends per step and layer\n(f: factors, l: low rank, s: sparse, "
    "c: compressed, r: computed again, -r: with the block below)"
)
_NAME_WIDTH = 18
_METHOD_WIDTH = 9


def methods_table(plan: Forecast) -> Table:
    """Returns a table with a row per method, within 80 columns."""
    table = Table(title=title(plan), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    table.add_column("method", overflow="fold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for planned in plan.methods:
        table.add_row(planned.method, *_method_cells(plan, planned))
    return table


def _method_cells(plan: Forecast, planned: Planned) -> Iterator[str]:
    dense, step_s = plan.dense, plan.seconds(planned)
    yield "yes" if planned.exact else "no"
    yield _kilobytes(planned.sent_bytes)
    yield times(dense.sent_bytes / planned.sent_bytes) if planned.sent_bytes else "-"
    yield str(planned.messages)
    yield milliseconds(planned.compute_s)
    yield milliseconds(step_s - planned.compute_s)
    yield milliseconds(step_s)
    yield f"{step_s / plan.seconds(dense):.3f}"


def layer_tables(plan: Forecast, console: Console) -> Iterator[Table]:
    """Yields a table of all layers and the total, or several if the methods do not fit into one."""
    left = plan.methods
    while left:
        count = _fitting(plan, left, console)
        yield _table(plan, left[:count])
        left = left[count:]


def _fitting(plan: Forecast, methods: Sequence[Planned], console: Console) -> int:
    unlimited = console.options.update(max_width=10_000)
    for count in range(len(methods), 1, -1):
        table = _table(plan, methods[:count])
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            return count
    return 1


def _table(plan: Forecast, methods: Sequence[Planned]) -> Table:
    table = Table(
        title=_LAYERS,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("layer", no_wrap=True, min_width=_NAME_WIDTH)
    for heading in ("shape", "rows", "pays\nbelow", *(_heading(m.method) for m in methods)):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in plan.layers:
        table.add_row(*_layer_cells(layer), *(_sent(layer.sent.get(m.method)) for m in methods))
    table.add_section()
    for name, cells in _totals(methods):
        table.add_row(name, "", "", "", *cells)
    return table


def title(plan: Forecast) -> str:
    """Returns the title: model, rows, sites and network."""
    sites, link = plan.question.sites, plan.question.link.name
    return (
        f"{plan.subject.name}, {plan.subject.rows} rows a batch, {sites} sites, link {link}"
        f"{plan.question.network.title}"
    )


def _heading(method: str) -> str:
    if len(method) < _METHOD_WIDTH:
        return method
    lines = method.replace("rank-dad-", "rank-dad:").split(":")
    return "\n".join(v if len(v) < _METHOD_WIDTH else v.replace("=", "=\n") for v in lines)


def _layer_cells(layer: LayerPlan) -> tuple[str, ...]:
    rows = "" if layer.rows is None else f"{layer.rows:,}"
    return shortened(layer.name), "x".join(map(str, layer.shape)), rows, _limit(layer)


def _limit(layer: LayerPlan) -> str:
    """Rows below which exact factors pay; the range if weights differ."""
    if layer.break_even is None:
        return ""
    low, high = (inf if isinf(limit) else int(limit) for limit in layer.break_even)
    words = ["any" if isinf(limit) else f"{limit:,}" for limit in (low, high)]
    return words[0] if low == high else f"{words[0]}-{words[1]}"


def shortened(name: str, width: int = _NAME_WIDTH) -> str:
    """Returns a name, without its middle if it is too long."""
    if len(name) <= width:
        return name
    left = (width - 1) // 2
    return f"{name[:left]}…{name[len(name) - (width - 1 - left) :]}"


def _sent(sent: LayerBytes | None) -> str:
    if sent is None:
        return ""
    if sent.sent_bytes is None:
        return f"-{sent.marks}"
    return _kilobytes(sent.sent_bytes) + (sent.marks or " ")


def _kilobytes(nbytes: float) -> str:
    return f"{nbytes / 1e3:,.{1 if nbytes < 100e3 else 0}f}"


def _totals(methods: Sequence[Planned]) -> Iterator[tuple[str, list[str]]]:
    yield "total", [_kilobytes(m.sent_bytes) + " " for m in methods]
    yield "with TCP/IP, mean", [_kilobytes(m.wire_bytes) + " " for m in methods]


_EVEN = 0.03
"""Relative difference of step times below which they count as equal."""


def sentences(plan: Forecast) -> Iterator[str]:
    """Yields which methods pay, by how much, and the link rate from which on dense is as fast."""
    sites, link = plan.question.sites, plan.question.link.name
    for exact, kind in ((True, "exact"), (False, "approximate")):
        best = plan.fastest(exact=exact)
        if best is not None:
            yield f"Of the {kind} methods {_verdict(plan, best)}. {_from_where_on(plan, best)}"
    yield (
        f"Alone a step takes {_ms(plan.alone.compute_s)} here; dense, with {sites} sites on "
        f"{link}, {_ms(plan.seconds(plan.dense))}."
    )
    limits = [layer.break_even for layer in plan.layers if layer.break_even is not None]
    if limits:
        yield _rows(plan, [low for low, _ in limits], [high for _, high in limits])


def why_equal_layers_differ(plan: Forecast) -> str:
    """Explains why layers of one shape send different bytes by one method; empty if none do."""
    sent = defaultdict[tuple[object, ...], set[int]](set)
    for layer in plan.layers:
        for method, told in layer.sent.items():
            if told.sent_bytes is not None:
                kind = layer.shape, layer.rows, layer.break_even, method, told.marks
                sent[kind].add(told.sent_bytes)
    unlike = dict.fromkeys(kind[3] for kind, amounts in sent.items() if len(amounts) > 1)
    if not unlike:
        return ""
    return (
        f"Equal layers differ by {', '.join(map(str, unlike))}: of each, one site merges what the "
        f"others send. The table is of site 0; over all layers the sites send about the same."
    )


def _verdict(plan: Forecast, best: Planned) -> str:
    faster = plan.seconds(plan.dense) / plan.seconds(best)
    fewer = plan.dense.sent_bytes / max(best.sent_bytes, 1)
    if faster < 1 - _EVEN:
        speed = f"but {times(1 / faster)} x as slow as dense: none pays on this link"
    elif faster < 1 + _EVEN:
        speed = "as fast as dense: none pays on this link"
    else:
        speed = f"{times(faster)} x as fast as dense"
    sent = "as many bytes" if fewer < 1.05 else f"{times(fewer)} x fewer bytes"
    return f"{best.method} is the fastest, {_ms(plan.seconds(best))}: {speed}, with {sent}"


def _from_where_on(plan: Forecast, best: Planned) -> str:
    """Link rate from which on dense is as fast; empty if it is as fast already."""
    if plan.question.link.rate_bit_per_s is None or plan.seconds(best) >= plan.seconds(plan.dense):
        return ""
    rate = plan.even_rate(best)
    if rate is None:
        highest = ShapedLink(rate_bit_per_s=HIGHEST_BIT_PER_S).name
        return f"Dense is slower than it up to {highest}."
    rounded = ShapedLink(rate_bit_per_s=float(f"{rate:.2g}"))
    return f"From {rounded.name} on dense is as fast."


def _rows(plan: Forecast, lows: list[float], highs: list[float]) -> str:
    counted = [layer for layer in plan.layers if layer.rows and layer.break_even]
    paying = [v for v in counted if v.break_even and (v.rows or 0) < v.break_even[1]]
    return (
        f"Exact factors are fewer bytes in {len(paying)} of {len(counted)} layers at these rows; "
        f"the break-even is between {min(lows):,.0f} and {max(highs):,.0f} rows."
    )


def _ms(seconds: float) -> str:
    return f"{milliseconds(seconds)} ms"
