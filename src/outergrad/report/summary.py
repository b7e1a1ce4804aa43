"""Key figures of a run, at the top of the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outergrad._amounts import seconds
from outergrad._noise import noise_batches
from outergrad.report.recording import Recording
from outergrad.report.series import dense_bytes
from outergrad.report.verdict import verdict

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


def columns_of(summaries: Iterable[Summary]) -> list[str]:
    """Returns the scalars that the table shows: losses first, then accuracies, then others."""
    names = {name for found in summaries for name in found.finals}
    return sorted(names, key=_place)[:_SCALARS_SHOWN]


def _place(name: str) -> tuple[int, str]:
    lower = name.lower()
    return (0 if "loss" in lower else 1 if "acc" in lower else 2), name
