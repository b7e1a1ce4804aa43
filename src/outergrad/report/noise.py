"""How noisy the gradients of a run are, from the norms that its sites recorded."""

from __future__ import annotations

from outergrad.report.recording import Recording

LATE = 0.75
"""The part of the recorded steps before those that are looked at."""


def noise_scale(recording: Recording) -> float | None:
    """Batches of one site whose mean gradient has as much noise as signal; None if not known.

    Of S sites whose gradients g are means over b samples each, and their mean G:
    the signal squared is (S E‖G‖² - E‖g‖²) / (S - 1), without bias, and the variance of a
    site's gradient S (E‖g‖² - E‖G‖²) / (S - 1); their ratio is the scale, in units of b.
    Sums are over layers and over the last quarter of the recorded steps.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training, arXiv 1812.06162,
    appendix A.
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
    signal = sites * mean - own
    return float(sites * (own - mean) / signal) if signal > 0 else None
