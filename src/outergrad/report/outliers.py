"""Samples whose gradients are outliers, where sites recorded them."""

from __future__ import annotations

from outergrad.report.recording import Recording

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
