"""Sites of runs: their names, and a table of how well the model does at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from outergrad.report.recording import Recording

_MINUS = "\N{MINUS SIGN}"
_STUCK = "\N{NO-BREAK SPACE}"
_NOTHING = "\N{EN DASH}"
_MOST_NAMED = 3
_MORE_COLUMNS = 3
_SMALL = 1e-9
Figure = Sequence[float]


def site_names(recording: Recording) -> dict[int, str]:
    """Returns the name of each site that is known of, by its number; "site 0" where it has none."""
    runs = recording.runs
    count = 0 if runs.empty else int(runs["sites"].max())
    tables = (runs, recording.steps, recording.layers, recording.evaluations)
    seen = {int(site) for table in tables for site in table["site"]}
    names = {site: f"site {site}" for site in sorted({*range(count), *seen})}
    for run in runs.itertuples():
        names |= dict(enumerate(run.took_part or ()))
    for run in runs.itertuples():
        names |= {int(run.site): run.name} if run.name else {}
    return names


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of figures with intervals.

    Attributes:
        heading: its heading.
        field: field of the evaluation that has the figure.
        name: of the figure.
        form: formats a value.
        is_difference: whether 0 is marked.
    """

    heading: str
    field: str
    name: str
    form: Callable[[float], str]
    is_difference: bool = False

    def of(self, evaluation: Any) -> Figure:
        """Returns the figure of an evaluation; empty if it has none."""
        found = getattr(evaluation, self.field).get(self.name, ())
        return found if found and all(map(math.isfinite, found)) else ()

    def scale(self, evaluations: Sequence[Any]) -> tuple[float, float]:
        """Returns the ends of the axis on which all rows are drawn."""
        values = [value for one in evaluations for value in self.of(one)]
        if self.is_difference:
            values.append(0.0)
        low, high = min(values), max(values)
        room = 0.06 * (high - low) or 0.05
        return low - room, high + room


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _points(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", _MINUS)


def _three(value: float) -> str:
    return f"{value:.3f}"


def _three_signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", _MINUS)


_KNOWN = (
    Column(heading="Accuracy", field="figures", name="accuracy", form=_percent),
    Column(heading="AUC", field="figures", name="auc", form=_three),
    Column(heading="Calibration error", field="figures", name="calibration error", form=_three),
    Column(
        heading="Gain in accuracy, points",
        field="gains",
        name="accuracy",
        form=_points,
        is_difference=True,
    ),
    Column(
        heading="Gain in AUC",
        field="gains",
        name="auc",
        form=_three_signed,
        is_difference=True,
    ),
)
_WHAT = (
    "How well the model does on rows that each site has held out, in its last evaluation "
    "(<code>session.log_eval</code>). Brackets, and lines below the numbers, are intervals at "
    "95 %. A gain is over what the site reaches by training alone: an interval to the right of 0, "
    "the mark, says that training with the others has helped this site, one to the left that it "
    "has cost. The calibration error is the mean distance of predicted probabilities from observed "
    "shares."
)


def site_section(recordings: Mapping[str, Recording]) -> str:
    """Returns the section about single sites; empty if none was evaluated."""
    rows = [
        (run, name, site_names(found)[int(row.site)], row)
        for run, (name, found) in enumerate(recordings.items())
        for row in found.evaluations.drop_duplicates("site", keep="last").itertuples()
    ]
    if not rows:
        return ""
    order = list(dict.fromkeys(site for _, _, site, _ in sorted(rows, key=lambda of: of[3].site)))
    rows.sort(key=lambda of: (order.index(of[2]), of[0]))
    evaluations = [row for *_, row in rows]
    columns = [column for column in _columns(evaluations) if any(map(column.of, evaluations))]
    scales = {column: column.scale(evaluations) for column in columns}
    heads = ["Site", "Rows", "Classes", *(column.heading for column in columns)]
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in heads)
    body = "".join(
        _row(run, name if len(recordings) > 1 else "", site, row, scales)
        for run, name, site, row in rows
    )
    return (
        f'<section id="sites"><h2>At each site</h2><p class="what">{_WHAT}</p>'
        f'<table class="figures summary sites"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
        '<figure data-figure="site-lines"><figcaption>Over training</figcaption></figure>'
        '<figure data-figure="calibration"><figcaption>Calibration'
        '<span class="which"></span></figcaption></figure></section>'
    )


def _columns(evaluations: Sequence[Any]) -> list[Column]:
    """Known columns, and some of what was logged beside."""
    known = {column.name for column in _KNOWN}
    names = dict.fromkeys(name for row in evaluations for name in row.figures if name not in known)
    more = [Column(heading=n, field="figures", name=n, form=_three) for n in names]
    return [*_KNOWN, *more[:_MORE_COLUMNS]]


def _row(
    run: int, name: str, site: str, row: Any, scales: Mapping[Column, tuple[float, float]]
) -> str:
    of_run = f"<span class=method><span class=swatch></span>{escape(name)}</span>" if name else ""
    cells = [("Rows", f"{row.rows:,}" if row.rows else _NOTHING), ("Classes", _shares(row.shares))]
    cells += [(c.heading, _cell(c, c.of(row), *scale)) for c, scale in scales.items()]
    told = "".join(f'<td data-head="{escape(head)}">{cell}</td>' for head, cell in cells)
    return f"<tr data-run={run}><th scope=row>{escape(site)}{of_run}</th>{told}</tr>"


def _cell(column: Column, figure: Figure, low: float, high: float) -> str:
    """A value with its interval, in words and drawn."""
    if not figure:
        return _NOTHING
    value, *interval = figure
    if not interval:
        return escape(column.form(value))
    told = ", ".join(map(column.form, interval)).replace(" %,", ",")
    return (
        f"<span>{escape(column.form(value))} <span class=interval>[{escape(told)}]</span></span>"
        f"{_strip(figure, low, high, column.is_difference)}"
    )


def _strip(figure: Figure, low: float, high: float, marks_zero: bool) -> str:
    def at(value: float) -> float:
        return 100 * (value - low) / max(high - low, _SMALL)

    value, left, right = map(at, figure)
    zero = f"<u style=left:{at(0):.1f}%></u>" if marks_zero else ""
    return (
        f"<span class=strip>{zero}<i style=left:{left:.1f}%;width:{right - left:.1f}%></i>"
        f"<b style=left:{value:.1f}%></b></span>"
    )


def _shares(shares: Mapping[str, float]) -> str:
    """Shares of classes: named if they are few, and drawn."""
    if not shares:
        return _NOTHING
    told = ", ".join(f"{name}{_STUCK}{100 * share:.0f}{_STUCK}%" for name, share in shares.items())
    if len(shares) > _MOST_NAMED:
        least, most = (100 * of(shares.values()) for of in (min, max))
        told = f"{len(shares)} classes, {least:.0f} to {most:.0f} %"
    parts = "".join(
        f"<i style=width:{100 * share:.1f}%;opacity:{1 - 0.75 * k / max(len(shares) - 1, 1):.2f}>"
        "</i>"
        for k, share in enumerate(shares.values())
    )
    return f"<span class=classes>{escape(told)}<span class=shares>{parts}</span></span>"
