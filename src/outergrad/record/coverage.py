"""Coverage table: how each parameter is sent, why, and what other sites can learn from it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from outergrad._amounts import seconds
from outergrad._printable import printable
from outergrad.comm.cost import cost_of
from outergrad.core.choosing import Chooser, Trial
from outergrad.core.compressor import Compressor
from outergrad.core.reasons import COMPRESSED, AutoWay, Reason, Why
from outergrad.core.types import Route, Slot, Unit

_OWN_GRADIENT = "this site's gradient"
_MEAN_GRADIENT = "the mean gradient"
_LOCAL = ("local", "each site keeps its own", "nothing")
_WAYS = {
    Route.GATHER: "triplets",
    Route.TWO_WAY: "merged triplets",
    Route.REDUCE: "sketches",
}
_DENSE = {
    Why.NOT_TAPPED: "accumulated, or not tapped in the last step; {pays}",
    Why.USED_OUTSIDE_LAYER: (
        "the weight is also used outside its layer, or in a gradient of a gradient"
    ),
    Why.OVERLAPPING: "shared by several products; {pays}",
    Why.ROWS: "{rows} rows here; {pays}",
    Why.NOT_CAPTURED: "accumulated, or not captured in the last step; {pays}",
    Why.USED_OUTSIDE_BLOCK: "a parameter is also used outside the block",
    Why.UNSENDABLE: "it reads what enters the model, or has hooks",
    Why.DENSE: "the method is dense",
    Why.OWING: "with it travels what the method before had not sent",
    Why.WHOLE: "with it travelled all that was owed: session.flush(whole=True)",
    Why.BYTES: "what would be sent of it is {nbytes} bytes; {pays}",
}
_Entry = tuple[str, str, str]
"""The columns "travels", "why" and "other sites learn" of a unit."""
_HEADINGS = ("parameter", "shape", "travels", "why", "other sites learn", "an audit read")


@dataclass(frozen=True)
class Travel:
    """One line of the coverage table.

    Attributes:
        parameter: full name.
        shape: shape of the parameter.
        travels: "factors", "low rank", "sparse", "compressed", "replayed", "dense", "local", "not
            trained", or, before the first step, "factors or dense" or "replayed or dense".
        why: the reason, in words.
        reveals: what the other sites can learn from this site's messages.
        read: the most that the attacks of `outergrad audit` had back of such a layer that travels
            so, in a word of `outergrad.record.readable.Word`; empty where nobody asked.
    """

    parameter: str
    shape: tuple[int, ...]
    travels: str
    why: str
    reveals: str
    read: str = ""


@dataclass(frozen=True)
class Coverage(Sequence[Travel]):
    """Coverage table of a model; `str()` formats it as text."""

    lines: tuple[Travel, ...]

    def __getitem__(self, index):  # type: ignore[override]  # noqa: ANN001, ANN204
        return self.lines[index]

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        cells = [_HEADINGS, *(_cells(line) for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = [_HEADINGS, tuple("-" * width for width in widths), *cells[1:]]
        padded = (zip(row, widths, strict=True) for row in rows)
        return "\n".join("  ".join(c.ljust(w) for c, w in row).rstrip() for row in padded)

    __repr__ = __str__


def _cells(line: Travel) -> tuple[str, ...]:
    shape = " x ".join(map(str, line.shape)) or "scalar"
    return (
        printable(line.parameter),
        shape,
        line.travels,
        printable(line.why),
        line.reveals,
        line.read,
    )


def coverage(
    params: Mapping[str, nn.Parameter],
    local: Collection[str],
    units: Sequence[Unit],
    reasons: Mapping[str, str],
    compressors: Sequence[Compressor],
    sites: int,
    chosen: Sequence[Reason | None],
    rows: Mapping[Slot, int],
    untappable: Mapping[Slot, str],
) -> Coverage:
    """Returns the coverage table of a model.

    Args:
        params: all parameters, including frozen ones.
        local: names of the parameters that each site keeps to itself.
        units: units of the trainable parameters that have a rule.
        reasons: for each other parameter, why it is sent dense.
        compressors: compressor of each unit.
        sites: number of sites.
        chosen: for each unit, why it was sent as it was in the last step; None before the first.
        rows: for each slot, the number of rows at this site in the last step.
        untappable: for each slot that could not be tapped at this site in the last step, why. Such
            a slot has no entry in `rows`.
    """
    dense = {name: ("dense", why, _dense_reveals(sites)) for name, why in reasons.items()}
    travels = dense | dict.fromkeys(local, _LOCAL)
    for u, unit in enumerate(units):
        describe = _unit_entry if unit.block is None else _block_entry
        here = _Here(
            sum(rows.get(slot, 0) for slot in unit.slots),
            next((untappable[slot] for slot in unit.slots if slot in untappable), None),
        )
        entry = describe(unit, compressors[u], sites, chosen[u], here)
        travels.update(dict.fromkeys(unit.params, entry))
        if entry[0] in [why.value for why in COMPRESSED]:
            vectors = dict.fromkeys(unit.vectors, ("dense", "a vector", _dense_reveals(sites)))
            travels.update(vectors | _coded_vectors(unit, compressors[u]))
    untrained = "not trained", "requires_grad is False", "nothing"
    lines = [Travel(n, tuple(p.shape), *travels.get(n, untrained)) for n, p in params.items()]
    return Coverage(tuple(lines))


class _Here(NamedTuple):
    """State of a unit at this site in the last step.

    Attributes:
        rows: number of rows of all its products.
        untappable: why it could not be tapped; None if it could.
    """

    rows: int
    untappable: str | None


def _coded_vectors(unit: Unit, compressor: Compressor) -> dict[str, _Entry]:
    found = [matrix for matrix in unit.matrices if matrix.vector]
    why = {m.weight: ", ".join(map(repr, compressor.codecs(m))) for m in found}
    return {n: ("compressed", f"a vector, through {of}", _OWN_GRADIENT) for n, of in why.items()}


def _unit_entry(
    unit: Unit, compressor: Compressor, sites: int, chosen: Reason | None, here: _Here
) -> _Entry:
    if sites == 1:
        return "dense", "a single site: nothing travels", "nothing"
    known = chosen or Reason(why=compressor.why)
    if known.why in (Why.OWING, Why.WHOLE, Why.DENSE):
        return _dense_entry(known, "", sites, here)
    limit, sparse = compressor.break_even(unit, sites), compressor.why == Why.SPARSE
    most = "any number of" if math.isinf(limit) else f"fewer than {math.ceil(limit)}"
    pays = (
        "always=True" if compressor.forced else f"factors are fewer bytes for {most} rows per site"
    )
    if chosen is not None and chosen.why == Why.ROWS and here.rows < limit:
        pays += "; another site has more, or cannot tap it"
    if limit <= 0 or (sparse and chosen is not None and chosen.why != Why.SPARSE):
        return "dense", "all of it is fewer bytes", _dense_reveals(sites)
    if sparse:
        is_sum = compressor.sketches is not None
        learnt = f"{_dense_reveals(sites)}, a few entries" if is_sum else compressor.reveals(unit)
        return "sparse", compressor.amount(unit), learnt
    if chosen is None:
        return "factors or dense", pays, compressor.reveals(unit)
    if chosen.why == Why.FACTORS:
        return "factors", pays + _auto(chosen.auto), compressor.reveals(unit)
    if chosen.why == Why.LOW_RANK:
        is_sum = chosen.route == Route.REDUCE
        learnt = (
            f"{_dense_reveals(sites)}, its largest parts" if is_sum else compressor.reveals(unit)
        )
        source = "factors" if chosen.tapped else "the formed gradient"
        return "low rank", f"{_WAYS[chosen.route]} of {source}{_auto(chosen.auto)}", learnt
    if chosen.why == Why.CODED:
        return chosen.why.value, compressor.amount(unit), compressor.reveals(unit)
    return _dense_entry(chosen, pays, sites, here)


def _block_entry(
    unit: Unit, compressor: Compressor, sites: int, chosen: Reason | None, here: _Here
) -> _Entry:
    most = int(cost_of(compressor, sites).share(4 * unit.dense_numel, Route.DENSE))
    pays = "always=True" if compressor.forced else f"pays below {most} bytes per step and site"
    cost = f"every site computes forward and backward of all {sites} sites' rows; {pays}"
    if chosen is None:
        return "replayed or dense", cost, compressor.reveals(unit)
    if chosen.why == Why.REPLAYED:
        return "replayed", cost, compressor.reveals(unit)
    return _dense_entry(chosen, pays, sites, here)


def _dense_entry(chosen: Reason, pays: str, sites: int, here: _Here) -> _Entry:
    if here.untappable is not None and chosen.why in (Why.ROWS, Why.NOT_TAPPED):
        return "dense", f"not tapped here: {here.untappable}", _dense_reveals(sites)
    why = _DENSE[chosen.why].format(pays=pays, rows=f"{here.rows:,}", nbytes=chosen.nbytes)
    return "dense", why, _dense_reveals(sites)


def _auto(auto: AutoWay | None) -> str:
    """Suffix of the reason: how reduce="auto" chose the route of a low-rank gradient."""
    if auto is None:
        return ""
    if auto.link is None:
        return f'; reduce="auto": {auto.way.value} when it was saved'
    others = ", ".join(f"{way.value} {1e3 * s:.3g}" for way, s in auto.others)
    measured = f"{1e3 * auto.link.delay_s:.3g} ms, {8e-6 * auto.link.bytes_per_s:.3g} Mbit/s"
    return f'; reduce="auto": {auto.way.value} {1e3 * auto.seconds:.3g} ms, {others} at {measured}'


def _dense_reveals(sites: int) -> str:
    """Information that an all-reduce reveals; of two sites each can subtract its own part."""
    return "nothing" if sites == 1 else _OWN_GRADIENT if sites == 2 else _MEAN_GRADIENT


def trials_noted(lines: Coverage, units: Sequence[Unit], chooser: Chooser) -> Coverage:
    """Returns the table with each parameter's chosen method, and the step times of its trials.

    Args:
        lines: the table.
        units: units of the model.
        chooser: chooser of their methods.
    """
    told = {name: _told(unit, chooser) for unit in units for name in unit.params}
    found = (replace(line, why=line.why + told.get(line.parameter, "")) for line in lines)
    return Coverage(tuple(found))


def _told(unit: Unit, chooser: Chooser) -> str:
    kept_s = chooser.kept_seconds
    took = "by the forecast" if kept_s is None else f"{seconds(kept_s)} a step"
    others = sorted(chooser.trials_of(unit), key=lambda pair: pair[1].step)
    last = dict(others)  # the last trial of each method
    return "; ".join([f"; Auto: {chooser.method_of(unit)!r}, {took}", *map(_trial, last.items())])


def _trial(of: tuple[str, Trial]) -> str:
    method, trial = of
    return f"{method} {seconds(trial.seconds)}, {trial.outcome.value} in step {trial.step}"
