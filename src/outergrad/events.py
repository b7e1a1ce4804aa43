"""What a session tells its recorders.

First a `Run`; then, at every recorded step, a `Layer` for each layer and a `Step` behind them;
`Scalars` whenever the training loop says something; a `Mishap` whenever a step comes to nothing or
the replicas are found to differ; a `Trial` whenever `og.Auto()` has tried something; a `Change`
whenever other sites take part; an `End` when the session is detached or its program ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """Steps of a session begin.

    Attributes:
        rank: this site.
        sites: number of sites.
        method: how gradients travel, as text.
        step: synchronised steps before the first of these; not 0 where a training goes on.
        time: seconds since 1970.
        shapes: of every parameter that is shared, by full name, in the order of the model.
        dense_bytes: bytes that a site would send per step in a ring all-reduce of all gradients,
            as DDP does.
        outergrad: its version.
        torch: its version.
        machine: what this site computes on.
    """

    rank: int
    sites: int
    method: str
    step: int
    time: float
    shapes: Mapping[str, tuple[int, ...]]
    dense_bytes: int
    outergrad: str
    torch: str
    machine: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer did in one synchronised step.

    What was not measured is None. A weight of several groups, or parts that arise apart, counts
    as so many matrices: their singular values are ordered together, their ranks averaged.

    Attributes:
        rank: this site.
        step: synchronised steps before this one.
        layer: full name of the weight, as in `state_dict`, with the bias that travels with it; of
            another parameter that travels by itself; or of a block that is computed again.
        travels: "factors", "low rank" (sketches, merged triplets), "sparse", "compressed",
            "replayed" or "dense".
        rows: N, rows of activations and deltas on this site; 0 for what is replayed or dense.
        kept_rows: R, the rows that this site sent of them, or the width of the sketches; of what is
            sparse, how many entries; 0 for what is replayed or dense.
        sent_bytes: payload bytes that this site sent for it.
        received_bytes: that it received.
        compress_s: seconds from its rows to packed factors.
        replay_s: seconds in which it was computed again for all sites.
        wait_s: seconds in which the training thread waited for the message that carried it, which
            may carry other layers, too.
        effective_rank: exponential of the entropy of the singular values of the mean gradient.
            Source: Roy and Vetterli, 2007.
        singular_values: the leading ones of the mean gradient, falling.
        relative_error: Frobenius norm of what this site did not send of its gradient and of what
            it had not sent before, relative to these; 0 where it sent all.
        residual_norm: Frobenius norm of what error feedback keeps for the next step.
        activation_norm: Frobenius norm of this site's activations, of all rows.
        delta_norm: of its deltas.
        gradient_norm: of its own gradient.
        mean_norm: of the mean gradient of all sites.
        cosine: between its own gradient and the mean gradient: 1 where all sites agree.
        duplicates: share of the directions of this site's rows, as they travel, that lie in the
            span of the other sites' (of an embedding: of its ids that others looked up, too): the
            mean squared cosine of the principal angles. 1: the others have them all.
        samples: B, how many samples the norms below are of, counted along the first dimension of
            what the layer is called with; 0 where these are not known. Only recorders with
            `samples=True` are told of these and the next.
        sample_norm: the median of the norms of what each sample adds to this site's gradient of
            the weight; with a mean as loss 1 / B of the sample's own gradient.
        outliers: samples that stand out, by their number in this site's batch: whose norm is above
            three times the median, the largest first, at most five.
        outlier_norms: their norms.
        unmeasured: why `duplicates` and `sample_norm` are not known where they could be, by name.
    """

    rank: int
    step: int
    layer: str
    travels: str
    rows: int
    kept_rows: int
    sent_bytes: int
    received_bytes: int
    compress_s: float
    replay_s: float
    wait_s: float
    effective_rank: float | None = None
    singular_values: tuple[float, ...] | None = None
    relative_error: float | None = None
    residual_norm: float | None = None
    activation_norm: float | None = None
    delta_norm: float | None = None
    gradient_norm: float | None = None
    mean_norm: float | None = None
    cosine: float | None = None
    duplicates: float | None = None
    samples: int = 0
    sample_norm: float | None = None
    outliers: tuple[int, ...] = ()
    outlier_norms: tuple[float, ...] | None = None
    unmeasured: Mapping[str, str] | None = None

    @property
    def discarded_energy(self) -> float | None:
        """Share of the squared Frobenius norm that was not sent."""
        return None if self.relative_error is None else self.relative_error**2


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one synchronised step was in all; comes behind its layers.

    Attributes:
        rank: this site.
        step: synchronised steps before this one.
        time: seconds since 1970, at its end.
        seconds: per step, on average since the last recorded one; None at the first.
        sent_bytes: payload and headers that this site sent in it.
        received_bytes: that it received.
        total_sent_bytes: in all steps so far, including the start of the session.
        compress_s: seconds per step that were spent on turning rows into factors: on average
            since the last recorded step, like `seconds`, of which it is a part.
        replay_s: likewise, in which blocks were computed again for all sites.
        wait_s: likewise, in which the training thread waited for other sites.
        took_part: names of the sites whose gradients it is the mean of, where the transport knows
            names, as `og.Star`.
        noise_batches: over how many batches of one site the mean gradient has as much noise as
            signal, by this site's norms of the last recorded steps; None where that is not known.
    """

    rank: int
    step: int
    time: float
    seconds: float | None
    sent_bytes: int
    received_bytes: int
    total_sent_bytes: int
    compress_s: float
    replay_s: float
    wait_s: float
    took_part: tuple[str, ...] = ()
    noise_batches: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scalars:
    """What the training loop gave to `session.log`.

    Attributes:
        rank: this site.
        step: synchronised steps so far.
        time: seconds since 1970.
        values: by name, as `loss`.
    """

    rank: int
    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Mishap:
    """A step that came to nothing, or after which the replicas differ.

    Told of whatever a recorder's `every`.

    Attributes:
        rank: this site.
        step: synchronised steps before this one.
        time: seconds since 1970.
        what: "skipped" (a gradient was not finite), "discarded" (the backward of a site raised, or
            a message was damaged), "lost" (a site died, hangs or is cut off) or "drifted"
            (parameters or buffers were found to differ between the sites).
        sites: where it arose.
        layer: full name of a parameter that it is about, or what was waited for; "" if unknown.
    """

    rank: int
    step: int
    time: float
    what: str
    sites: tuple[int, ...]
    layer: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`og.Auto()` has tried another way to share the gradients beside the one that it kept.

    Told of whatever a recorder's `every`.

    Attributes:
        rank: this site.
        step: synchronised steps before the decision.
        time: seconds since 1970.
        methods: that were tried, as text, of each group of layers, the largest first.
        seconds: of a step by them, the median at the slowest site.
        kept_seconds: likewise of a step by the methods that were kept till then.
        outcome: "faster" (they are kept from now on), "not measurably faster", "slower" or
            "twice as long".
    """

    rank: int
    step: int
    time: float
    methods: tuple[str, ...]
    seconds: float
    kept_seconds: float
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other sites take part from now on (`og.Star(when_lost="go on")`).

    Told of whatever a recorder's `every`.

    Attributes:
        rank: this site: the number that it had in the `Run`.
        step: synchronised steps before the first with these sites.
        time: seconds since 1970.
        epoch: how many times the sites have changed.
        sites: names of those that take part from now on.
        lost: names of those that do not any more.
        back: names of those that did not before.
    """

    rank: int
    step: int
    time: float
    epoch: int
    sites: tuple[str, ...]
    lost: tuple[str, ...]
    back: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class End:
    """A session ends: it was detached, or its program ended. A process that is killed tells none.

    Attributes:
        rank: this site.
        step: synchronised steps so far, as far as they were recorded.
        time: seconds since 1970.
        error: the type of the exception that ended the program, as "ValueError"; "" if none did.
    """

    rank: int
    step: int
    time: float
    error: str = ""


Event = Run | Layer | Step | Scalars | Mishap | Trial | Change | End
