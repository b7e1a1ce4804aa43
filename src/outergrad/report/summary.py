"""Key figures of a run, and its conclusion in words: bytes, time on a slow link, agreement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import isnan
from typing import TYPE_CHECKING, Any

from outergrad._amounts import fold, seconds
from outergrad._noise import noise_batches
from outergrad.events import Privacy
from outergrad.report.recording import Recording

if TYPE_CHECKING:
    from pandas import DataFrame

TIMES = ("compress_s", "replay_s", "wait_s", "rest_s")


def dense_bytes(recording: Recording) -> int | None:
    """Returns the bytes that DDP would send per step; None if not known."""
    return None if recording.runs.empty else int(recording.runs["dense_bytes"].iloc[-1])


def time_split(steps: DataFrame) -> DataFrame:
    """Returns the steps with known durations, with `rest_s`, the remainder of `seconds`.

    All parts add up to `seconds`. Older records have the parts of one step beside the mean of
    several steps: where these parts exceed the whole, they are scaled down to it.
    """
    names = [*TIMES[:-1]]
    known = steps[steps["seconds"].notna()]
    told = known[names].sum(axis="columns")
    fitting = (known["seconds"] / told.where(told > 0)).clip(upper=1).fillna(1)
    parts = known[names].mul(fitting, axis="index")
    return known.assign(**parts, rest_s=known["seconds"] - parts.sum(axis="columns"))


LATE = 0.75
"""Share of the recorded steps that are skipped, from the start."""


def noise_scale(recording: Recording) -> float | None:
    """Returns the batches of one site whose mean gradient has as much noise as signal, if known.

    `outergrad._noise.noise_batches` has the formula. Sums are over layers and over the last quarter
    of the recorded steps; squared norms of single sites are averaged. None if not known.
    """
    table = recording.layers[["layer", "step", "site", "gradient_norm", "mean_norm"]].dropna()
    sites = 0 if recording.runs.empty else int(recording.runs["sites"].max())
    table = table[table["step"] >= table["step"].quantile(LATE)]
    groups = table.groupby(["layer", "step"])
    whole = groups["site"].nunique() == sites
    if sites < 2 or not whole.any():
        return None
    means = groups.agg(
        own=("gradient_norm", lambda norms: (norms**2).mean()),
        mean=("mean_norm", lambda norms: (norms**2).mean()),
    )
    own, mean = means[whole].sum()
    return noise_batches(float(own), float(mean), sites)


_SCALARS_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Key figures of a run.

    Attributes:
        method: method of sending gradients; empty if not known.
        sites: number of sites.
        steps: number of synchronised steps, as far as they were recorded.
        sent_bytes: bytes that a site sent per step, on average; None if no step was recorded.
        dense_bytes: bytes that DDP would have sent.
        step_s: mean seconds per step; the parts in the figure of times add up to it.
        finals: last value of each scalar, as a mean over sites.
        verdict: conclusion, as part of a sentence; empty if not known.
        noise_batches: noise scale of the gradients, in batches of a site.
    """

    method: str
    sites: int
    steps: int
    sent_bytes: float | None
    dense_bytes: int | None
    step_s: float | None
    finals: dict[str, float]
    verdict: str
    noise_batches: float | None


def summary(recording: Recording) -> Summary:
    """Returns the key figures of a recording."""
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
        verdict=verdict(recording),
        noise_batches=noise_scale(recording),
    )


def trials(recording: Recording) -> list[str]:
    """Returns the trials of `og.Auto()` in a run, a line of text each, as reported by one site."""
    told = recording.trials
    return [
        f"step {trial.step:,}: {' / '.join(dict.fromkeys(trial.methods))}, {trial.outcome}: "
        f"{seconds(trial.seconds)} against {seconds(trial.kept_seconds)}"
        for trial in told[told["site"] == told["site"].min()].itertuples()
    ]


def released(recording: Recording) -> list[str]:
    """Returns what a run has released by its ledger of privacy, as reported last by one site."""
    rows = recording.privacy
    first = rows[rows["site"] == rows["site"].min()]
    return [_line_of(row) for row in first.tail(1).itertuples()]


def _line_of(row: Any) -> str:
    told: dict[str, Any] = {f.name: getattr(row, f.name, row.site) for f in fields(Privacy)}
    told["stop_at"] = None if isnan(row.stop_at) else row.stop_at
    return str(Privacy(**told))


def columns_of(summaries: Iterable[Summary]) -> list[str]:
    """Returns the scalars that the table shows: losses first, then accuracies, then others."""
    names = {name for found in summaries for name in found.finals}
    return sorted(names, key=_place)[:_SCALARS_SHOWN]


def _place(name: str) -> tuple[int, str]:
    lower = name.lower()
    return (0 if "loss" in lower else 1 if "acc" in lower else 2), name


USUAL_LINK = "100 Mbit/s"
USUAL_BIT_PER_S = 100e6
_EVEN = 0.03
"""Relative difference below which amounts count as equal."""


def on_usual_link(nbytes: float) -> float:
    """Returns the seconds that bytes take at 100 Mbit/s."""
    return 8 * nbytes / USUAL_BIT_PER_S


def compared(sent_bytes: float, ddp_bytes: float) -> str:
    """Returns how a step's bytes compare with DDP's, e.g. "9.5 times fewer bytes than DDP"."""
    ratio = ddp_bytes / sent_bytes
    if abs(ratio - 1) < _EVEN:
        return "as many bytes as DDP"
    more = f"{fold(1 / ratio)} more" if ratio < 1 else f"{fold(ratio)} fewer"
    return f"{more} bytes than DDP"


def cost_of_bytes(sent_bytes: float, ddp_bytes: float) -> str:
    """Returns the comparison, with the seconds of a step that both take at 100 Mbit/s."""
    ours, theirs = (seconds(on_usual_link(size)) for size in (sent_bytes, ddp_bytes))
    said = compared(sent_bytes, ddp_bytes)
    return f"{said}; at {USUAL_LINK} they take {ours} of a step, DDP's {theirs}"


def verdict(recording: Recording) -> str:
    """Returns a recording's conclusion in a sentence; empty if nothing is known."""
    steps, ddp_bytes = recording.steps, dense_bytes(recording)
    parts: list[str] = []
    if len(steps) and ddp_bytes and (sent := float(steps["sent_bytes"].mean())) > 0:
        parts.append(compared(sent, ddp_bytes))
        parts += [told] if (told := _speed(recording, sent, ddp_bytes)) else []
    parts += [told] if (told := _agreement(recording)) else []
    return "; ".join(parts)


def _speed(recording: Recording, sent_bytes: float, ddp_bytes: float) -> str:
    """Step time against DDP's, both with the recorded compute time and a link of 100 Mbit/s."""
    split = time_split(recording.steps)
    if split.empty:
        return ""
    computing = float(split["rest_s"].mean())
    ours = computing + float((split["compress_s"] + split["replay_s"]).mean())
    ratio = (computing + on_usual_link(ddp_bytes)) / (ours + on_usual_link(sent_bytes))
    if abs(ratio - 1) < _EVEN:
        return f"at {USUAL_LINK} about as fast"
    faster = f"{fold(ratio)} faster" if ratio > 1 else f"{fold(1 / ratio)} slower"
    return f"at {USUAL_LINK} about {faster}"


def _agreement(recording: Recording) -> str:
    """Agreement of the sites' gradients in the last quarter of the recorded steps."""
    layers, sites = recording.layers, len(recording.layers["site"].unique())
    if not recording.runs.empty:
        sites = int(recording.runs["sites"].max())
    late = layers[layers["step"] >= layers["step"].quantile(LATE)]["cosine"].dropna()
    if sites < 2 or late.empty:
        return ""
    shared = pairwise(math.sqrt((late**2).mean()), sites)
    if shared > 0.5:
        return "the sites agree"
    return "the sites agree in part" if shared > 0.1 else "the sites have little in common"


def pairwise(cosine: float, sites: int) -> float:
    """Returns the cosine between two sites' gradients, from that between one of them and the mean.

    It assumes that all gradients have the same length and each pair the same angle: cosine squared
    is (1 + (S - 1) pairwise) / S.
    """
    return (sites * cosine**2 - 1) / (sites - 1)


SHOWN = 20


def outliers(recording: Recording) -> list[str]:
    """Returns the largest outliers, a line of text each, largest first.

    The measure is a sample's norm, as a multiple of the median of its layer's samples in that step.
    """
    table = recording.layers
    table = table[table["outlier_norms"].map(bool) & table["sample_norm"].notna()]
    found = [
        (norm / row.sample_norm if row.sample_norm else float("inf"), row, place)
        for row in table.itertuples()
        for place, norm in zip(row.outliers, row.outlier_norms, strict=False)
    ]
    found.sort(key=lambda of: -of[0])
    return [
        f"site {row.site}, step {row.step:,}: sample {place} of {row.samples}, {times:.3g} times "
        f"the median in {row.layer}"
        for times, row, place in found[:SHOWN]
    ]
