"""Events as numbers under tags, for dashboards with curves."""

from __future__ import annotations

from outergrad.events import Change, End, Event, Layer, Mishap, Run, Scalars, Step, Trial

STEP = (
    "seconds",
    "sent_bytes",
    "received_bytes",
    "total_sent_bytes",
    "compress_s",
    "replay_s",
    "wait_s",
    "noise_batches",
)
LAYER = (
    "sent_bytes",
    "received_bytes",
    "wait_s",
    "effective_rank",
    "relative_error",
    "residual_norm",
    "activation_norm",
    "delta_norm",
    "gradient_norm",
    "mean_norm",
    "cosine",
    "duplicates",
    "sample_norm",
)
ROWS = ("rows", "kept_rows", "compress_s")
GROUPS = (
    "step",
    "mishap",
    "trial",
    *LAYER,
    *ROWS,
    "replay_s",
    "spectral_norm",
    "largest_sample_norm",
    "travels",
)
"""Prefixes of tags, before the slash."""


def figures(event: Event) -> dict[str, float]:
    """Returns the numbers of an event, by tag.

    A layer's tags are `<figure>/<layer>`, so that a dashboard shows all layers of one figure
    together; `spectral_norm` is the largest singular value of the mean gradient. A step's tags are
    `step/<figure>`. A failed step is a 1 at `mishap/<what>`, and a trial of `og.Auto()` is
    `trial/seconds` and `trial/kept_seconds`. Scalars of the training loop keep their own names.
    Figures that were not measured, or have no meaning for the way in which a layer was sent, are
    left out.
    """
    if isinstance(event, Scalars):
        return dict(event.values)
    if isinstance(event, Run | Change | End):
        return {}
    if isinstance(event, Mishap):
        return {f"mishap/{event.what}": 1.0}
    if isinstance(event, Trial):
        return {"trial/seconds": event.seconds, "trial/kept_seconds": event.kept_seconds}
    if isinstance(event, Step):
        return {f"step/{name}": v for name in STEP if (v := getattr(event, name)) is not None}
    return _of_layer(event)


def about(run: Run) -> dict[str, str | int]:
    """Returns a run's description, for a table of runs."""
    names = ("method", "rank", "sites", "step", "dense_bytes", "outergrad", "torch")
    return {name: getattr(run, name) for name in names}


def _of_layer(event: Layer) -> dict[str, float]:
    names = LAYER
    if event.travels in ("factors", "low rank"):
        names += ROWS
    if event.travels == "replayed":
        names += ("replay_s",)
    tags = {f"{n}/{event.layer}": v for n in names if (v := getattr(event, n)) is not None}
    if event.singular_values:
        tags[f"spectral_norm/{event.layer}"] = event.singular_values[0]
    if event.outlier_norms:
        tags[f"largest_sample_norm/{event.layer}"] = event.outlier_norms[0]
    return tags
