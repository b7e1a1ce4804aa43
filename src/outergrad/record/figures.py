"""Events as numbers under tags, as boards of curves want them."""

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
"""What stands before the slash of a tag."""


def figures(event: Event) -> dict[str, float]:
    """The numbers of an event by tag.

    A layer's are `<figure>/<layer>`, so that a board shows the layers of one figure beside each
    other; `spectral_norm` is the largest singular value of the mean gradient. Those of a step are
    `step/<figure>`, a step that came to nothing is a 1 at `mishap/<what>`, a trial of
    `og.Auto()` is `trial/seconds` beside `trial/kept_seconds`, those of the training loop have its
    own names. What was not measured, or means nothing for the way in which a layer
    travelled, is left out.
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
    """What a run is, for a table of runs."""
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
