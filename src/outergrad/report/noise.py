"""Noise scale of a run's gradients, from the norms that its sites recorded."""

from __future__ import annotations

from outergrad._noise import noise_batches
from outergrad.report.recording import Recording

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
