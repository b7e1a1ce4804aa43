"""Conclusion of a run in words: its bytes, its time on a slow link, the sites' agreement."""

from __future__ import annotations

import math

from outergrad._amounts import fold, seconds
from outergrad.report.recording import Recording
from outergrad.report.series import dense_bytes, time_split

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
    late = layers[layers["step"] >= layers["step"].quantile(0.75)]["cosine"].dropna()
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
