"""Conclusions of a plan, in sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from outergrad._amounts import milliseconds, times
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.forecast import HIGHEST_BIT_PER_S, Forecast
from outergrad.tools.plan.measure import Planned

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
