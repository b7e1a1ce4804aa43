"""How noisy the gradients of a run are, from the norms that its sites recorded."""

from __future__ import annotations

from outergrad._noise import noise_batches
from outergrad.report.recording import Recording

LATE = 0.75
"""The part of the recorded steps before those that are looked at."""


def noise_scale(recording: Recording) -> float | None:
    """Batches of one site whose mean gradient has as much noise as signal; None if not known.

    `outergrad._noise.noise_batches` says how. Sums are over layers and over the last quarter of the
    recorded steps; squared norms of single sites are averaged.
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
