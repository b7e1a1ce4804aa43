"""The few numbers that a page begins with."""

from __future__ import annotations

from dataclasses import dataclass

from outergrad.report._load import Recording
from outergrad.report._series import dense_bytes

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SCALARS_SHOWN = 4
_NOTHING, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in a line.

    Attributes:
        method: how gradients travelled; empty where it is not known.
        sites: their number.
        steps: synchronised steps, as far as they were recorded.
        sent_bytes: bytes that a site sent per step, on average; None where no step was recorded.
        dense_bytes: what DDP would have sent.
        step_s: mean of the seconds per step: what the parts of the figure of times add up to.
        finals: the last value of each scalar, as a mean over sites.
    """

    method: str
    sites: int
    steps: int
    sent_bytes: float | None
    dense_bytes: int | None
    step_s: float | None
    finals: dict[str, float]


def summary(recording: Recording) -> Summary:
    """Takes them from a recording."""
    runs, steps, scalars = recording.runs, recording.steps, recording.scalars
    seconds = steps["seconds"].dropna()
    last = scalars.drop_duplicates(["site", "name"], keep="last")
    here = max(len(set(table["site"])) for table in (runs, steps, scalars, recording.layers))
    done = [int(steps["step"].max()) + 1] if len(steps) else []
    done += [int(scalars["step"].max())] if len(scalars) else []
    return Summary(
        method="" if runs.empty else str(runs["method"].iloc[-1]),
        sites=here if runs.empty else int(runs["sites"].max()),
        steps=max(done, default=0),
        sent_bytes=float(steps["sent_bytes"].mean()) if len(steps) else None,
        dense_bytes=dense_bytes(recording),
        step_s=float(seconds.mean()) if len(seconds) else None,
        finals={str(name): float(v) for name, v in last.groupby("name")["value"].mean().items()},
    )


def columns_of(summaries: list[Summary]) -> list[str]:
    """The scalars that the table shows: losses first, then accuracies, then others."""
    names = {name for found in summaries for name in found.finals}
    return sorted(names, key=_place)[:_SCALARS_SHOWN]


def _place(name: str) -> tuple[int, str]:
    lower = name.lower()
    return (0 if "loss" in lower else 1 if "acc" in lower else 2), name


def amount(size: float | None) -> str:
    """Bytes for a reader, as ``1.2 MB``."""
    if size is None:
        return _NOTHING
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{_digits(size)} {_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds for a reader, as ``12 ms``."""
    if seconds is None:
        return _NOTHING
    return f"{_digits(seconds)} s" if seconds >= 1 else f"{_digits(seconds * 1e3)} ms"


def saving(found: Summary) -> str:
    """How many times fewer bytes than DDP's, as ``19×``."""
    if not found.sent_bytes or not found.dense_bytes:
        return _NOTHING
    ratio = found.dense_bytes / found.sent_bytes
    return f"{_digits(ratio)}{_TIMES}" if ratio >= 0.995 else f"{_digits(1 / ratio)}{_TIMES} more"


def number(value: float | None) -> str:
    """A scalar for a reader: four digits."""
    return _NOTHING if value is None else f"{value:.4g}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2g}"
