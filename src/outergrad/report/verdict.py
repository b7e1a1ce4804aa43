"""What a run comes to, in words: its bytes, its time on a slow link, whether its sites agree."""

from __future__ import annotations

import math

from outergrad._amounts import fold, seconds
from outergrad.report.recording import Recording
from outergrad.report.series import dense_bytes, time_split

USUAL_LINK = "100 Mbit/s"
USUAL_BIT_PER_S = 100e6
_EVEN = 0.03
"""Amounts that differ by less are as good as equal."""


def on_usual_link(nbytes: float) -> float:
    """Seconds that bytes take at 100 Mbit/s."""
    return 8 * nbytes / USUAL_BIT_PER_S


def compared(sent_bytes: float, ddp_bytes: float) -> str:
    """How the bytes of a step compare with DDP's: 9.5 times fewer."""
    ratio = ddp_bytes / sent_bytes
    if abs(ratio - 1) < _EVEN:
        return "as many bytes as DDP"
    more = f"{fold(1 / ratio)} more" if ratio < 1 else f"{fold(ratio)} fewer"
    return f"{more} bytes than DDP"


def cost_of_bytes(sent_bytes: float, ddp_bytes: float) -> str:
    """The same, and what both take of a step at 100 Mbit/s."""
    ours, theirs = (seconds(on_usual_link(size)) for size in (sent_bytes, ddp_bytes))
    said = compared(sent_bytes, ddp_bytes)
    return f"{said}; at {USUAL_LINK} they take {ours} of a step, DDP's {theirs}"


def verdict(recording: Recording) -> str:
    """A run in a sentence, of what was recorded of it; empty where that is nothing."""
    steps, ddp_bytes = recording.steps, dense_bytes(recording)
    parts: list[str] = []
    if len(steps) and ddp_bytes and (sent := float(steps["sent_bytes"].mean())) > 0:
        parts.append(compared(sent, ddp_bytes))
        parts += [told] if (told := _speed(recording, sent, ddp_bytes)) else []
    parts += [told] if (told := _agreement(recording)) else []
    return "; ".join(parts)


def _speed(recording: Recording, sent_bytes: float, ddp_bytes: float) -> str:
    """Forward and backward as they were, and behind them the bytes, on a link of 100 Mbit/s."""
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
    """Of the last quarter of the recorded steps."""
    layers, sites = recording.layers, len(recording.layers["site"].unique())
    if not recording.runs.empty:
        sites = int(recording.runs["sites"].max())
    late = layers[layers["step"] >= layers["step"].quantile(0.75)]["cosine"].dropna()
    if sites < 2 or late.empty:
        return ""
    shared = pairwise(math.sqrt((late**2).mean()), sites)
    if shared > 0.5:
        return "the sites agree"
    return "the sites agree in part" if shared > 0.1 else "the sites have little in common"


def pairwise(cosine: float, sites: int) -> float:
    """The cosine between two sites' gradients, of that between one of them and the mean.

    Of sites whose gradients have one length and one angle between any two of them:
    cosine squared is (1 + (S - 1) pairwise) / S.
    """
    return (sites * cosine**2 - 1) / (sites - 1)
