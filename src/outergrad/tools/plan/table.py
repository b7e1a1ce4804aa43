"""Tables of a plan for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf, isinf

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from outergrad._amounts import times
from outergrad.tools.plan.comparison import DENSE, Comparison, Standing, as_range, in_ms
from outergrad.tools.plan.forecast import Forecast
from outergrad.tools.plan.interval import Interval
from outergrad.tools.plan.layers import LayerBytes, LayerPlan
from outergrad.tools.plan.measure import Planned

_HEADINGS = (
    "ex-\nact",
    "kB sent\nper step",
    "fewer\nbytes",
    "comput-\ning, ms",
    "step,\nms",
    "x as fast\nas dense",
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
    comparison = plan.comparison
    table.add_row("alone", *_cells_alone(comparison.alone_s, comparison))
    for standing in comparison.standings:
        table.add_row(standing.method, *_cells(standing, comparison))
    return table


def _cells_alone(alone_s: Interval, comparison: Comparison) -> Iterator[str]:
    yield from ("", "-", "-")
    yield in_ms(alone_s)
    yield in_ms(alone_s)
    yield as_range(comparison.speed(alone_s))


def _cells(standing: Standing, comparison: Comparison) -> Iterator[str]:
    yield "yes" if standing.exact else "no"
    yield _kilobytes(standing.sent_bytes)
    yield times(comparison.fewer(standing)) if standing.sent_bytes else "-"
    yield in_ms(standing.compute_s)
    yield in_ms(standing.step_s)
    yield "1" if standing.method == DENSE else as_range(comparison.speed(standing.step_s))


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
    for name, cells in _totals(plan, methods):
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


def _totals(plan: Forecast, methods: Sequence[Planned]) -> Iterator[tuple[str, list[str]]]:
    beside = [m.sent_bytes - _of_layers(plan, m.method) for m in methods]
    yield "buffers, headers", [_kilobytes(nbytes) + " " for nbytes in beside]
    yield "total", [_kilobytes(m.sent_bytes) + " " for m in methods]
    yield "with TCP/IP, mean", [_kilobytes(m.wire_bytes) + " " for m in methods]


def _of_layers(plan: Forecast, method: str) -> int:
    cells = (layer.sent.get(method) for layer in plan.layers)
    return sum(cell.sent_bytes or 0 for cell in cells if cell is not None)


def about_dense(plan: Forecast) -> Iterator[str]:
    """Yields what a step takes alone and by dense, and in how many layers factors pay."""
    comparison, sites = plan.comparison, plan.question.sites
    yield (
        f"Alone a step takes {in_ms(comparison.alone_s, ' to ')} ms here; dense, with {sites} "
        f"sites on {plan.question.link.name}, {in_ms(comparison.dense.step_s, ' to ')} ms."
    )
    yield from less_than_alone(comparison)
    limits = [layer.break_even for layer in plan.layers if layer.break_even is not None]
    if limits:
        yield _rows(plan, [low for low, _ in limits], [high for _, high in limits])


def less_than_alone(comparison: Comparison) -> Iterator[str]:
    """Yields which methods compute less than training alone for sure, and why."""
    for one in comparison.standings:
        if one.compute_s.is_below(comparison.alone_s):
            yield (
                f"{one.method} computes less than training alone, because it does not form the "
                f"gradient of every weight."
            )


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


def _rows(plan: Forecast, lows: list[float], highs: list[float]) -> str:
    counted = [layer for layer in plan.layers if layer.rows and layer.break_even]
    paying = [v for v in counted if v.break_even and (v.rows or 0) < v.break_even[1]]
    return (
        f"Exact factors are fewer bytes in {len(paying)} of {len(counted)} layers at these rows; "
        f"the break-even is between {min(lows):,.0f} and {max(highs):,.0f} rows."
    )
