"""Events that a session passes to its recorders.

First comes a `Run`. Every recorded step gives a `Layer` for each layer, then a `Step`. `Scalars`
follow whenever the training loop logs something, a `Mishap` whenever a step fails or the replicas
are found to differ, a `Trial` whenever `og.Auto()` has tried something, a `Change` whenever the
participating sites change, an `Exchange` for each one of `og.LocalSteps(quorum=...)`, and a `Drift`
for each exchange to which a check of `og.OnDrift` has led. An
`Evaluation` comes from `session.log_eval`, a `Disclosure` whenever
other sites can learn something else from this site. An `End` comes when the session is detached or
its program ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """Start of a session's steps.

    Attributes:
        rank: rank of this site.
        sites: number of sites.
        method: how gradients are shared, as text.
        step: synchronised steps before the first of these; above 0 where training was resumed.
        time: seconds since 1970.
        shapes: shape of every shared parameter by full name, in the order of the model.
        dense_bytes: bytes that a site would send per step in a ring all-reduce of all gradients,
            as DDP does.
        outergrad: version of outergrad.
        torch: version of PyTorch.
        machine: hardware that this site computes on.
        name: name of this site, where the transport knows names; else "".
        took_part: names of all sites, in the order of their ranks; likewise.
        transport: how messages travel, and who can read them on their way; "" if not told.
        transform: what changes gradients before they travel, as text; "" for nothing, None if not
            known.
        buffers: how each shared buffer is kept alike, "broadcast" or "mean", by its name; None if
            not known.
        model: class of the model; "" if not known.
        commit: commit that is checked out where the source of that class lies; "" if not known.
        python: version of Python; "" if not known.
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
    name: str = ""
    took_part: tuple[str, ...] = ()
    transport: str = ""
    transform: str | None = None
    buffers: Mapping[str, str] | None = None
    model: str = ""
    commit: str = ""
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Statistics of one layer in one synchronised step.

    Values that were not measured are None. A weight of several groups, or of parts that are
    computed separately, counts as several matrices: their singular values are ordered together,
    their ranks averaged.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before this one.
        layer: full name, as in `state_dict`, of the weight, which includes the bias that travels
            with it; of another parameter that travels by itself; or of a recomputed block.
        travels: "factors", "low rank" (sketches, merged triplets), "sparse", "compressed",
            "replayed" or "dense".
        rows: N, rows of activations and deltas on this site; 0 if replayed or dense.
        kept_rows: R, number of these rows that this site sent, or the width of the sketches; the
            number of entries if sparse; 0 if replayed or dense.
        sent_bytes: payload bytes that this site sent for the layer.
        received_bytes: payload bytes that this site received for the layer.
        compress_s: seconds from the layer's rows to packed factors.
        replay_s: seconds in which the block was recomputed for all sites.
        wait_s: seconds in which the training thread waited for the message with this layer, which
            may hold other layers, too.
        effective_rank: exponential of the entropy of the singular values of the mean gradient.
            Source: Roy and Vetterli, 2007.
        singular_values: leading singular values of the mean gradient, in falling order.
        relative_error: Frobenius norm of what this site did not send of the sum of its gradient
            and its residual, relative to the norm of that sum; 0 where it sent all.
        residual_norm: Frobenius norm of the residual that error feedback keeps for the next step.
        activation_norm: Frobenius norm of this site's activations, over all rows.
        delta_norm: Frobenius norm of this site's deltas.
        gradient_norm: Frobenius norm of this site's own gradient.
        mean_norm: Frobenius norm of the mean gradient of all sites.
        cosine: cosine between this site's own gradient and the mean gradient; 1 where all sites
            agree.
        duplicates: share of the directions of this site's rows, as they travel, that lie in the
            span of the other sites' rows: the mean squared cosine of the principal angles. 1 if
            the others have them all. For an embedding: share of its ids that others looked up,
            too.
        samples: B, number of samples behind the norms below, counted along the first dimension of
            the layer's input; 0 where these are not known. Only recorders with `samples=True`
            receive this attribute and the next ones.
        sample_norm: median of the norms of the samples' contributions to this site's gradient of
            the weight. With a mean as loss a contribution is 1 / B of the sample's own gradient.
        outliers: numbers, within this site's batch, of the samples whose norm is above three times
            the median, the largest first, at most five.
        outlier_norms: norms of the outliers.
        rank_bound: largest rank that the mean gradient can have: the number of rows of all sites,
            where these travel whole, or the layer's inputs or outputs, if that is less. Averaged
            over several matrices, as `effective_rank` is, which it bounds.
        group_rows: number of this site's rows by group of samples, for recorders with
            `groups=True`. A group is a label of `session.groups`; without labels it is the site.
        group_gradient: leading singular values of what each group's rows add to this site's
            gradient of the weight, in falling order, at most 16. What groups add sums to the whole.
            Source: AutoSpec, arXiv 2406.11825.
        group_activations: likewise, of the activations of each group's rows.
        group_deltas: likewise, of their deltas.
        unmeasured: reasons why `duplicates`, `sample_norm` and `group_rows` are not known where
            they could be, by name.
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
    rank_bound: float | None = None
    group_rows: Mapping[str, int] | None = None
    group_gradient: Mapping[str, tuple[float, ...]] | None = None
    group_activations: Mapping[str, tuple[float, ...]] | None = None
    group_deltas: Mapping[str, tuple[float, ...]] | None = None
    unmeasured: Mapping[str, str] | None = None

    @property
    def discarded_energy(self) -> float | None:
        """Share of the squared Frobenius norm that was not sent."""
        return None if self.relative_error is None else self.relative_error**2


@dataclass(frozen=True, kw_only=True)
class Step:
    """Statistics of one synchronised step as a whole; follows those of its layers.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before this one.
        time: end of the step, in seconds since 1970.
        seconds: seconds per step, averaged since the last recorded one; None at the first.
        sent_bytes: payload and header bytes that this site sent in the step.
        received_bytes: payload and header bytes that this site received in the step.
        total_sent_bytes: bytes sent in all steps so far, including the start of the session.
        compress_s: seconds per step in which rows were turned into factors, averaged since the
            last recorded step, like `seconds`, of which it is a part.
        replay_s: likewise, seconds in which blocks were recomputed for all sites.
        wait_s: likewise, seconds in which the training thread waited for other sites.
        took_part: names of the sites whose gradients were averaged, where the transport knows
            names, as `og.Star` does.
        noise_batches: number of batches of one site over which the mean gradient has as much noise
            as signal, by this site's norms of the last recorded steps; None if not known.
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
    """Values that the training loop passed to `session.log`.

    Attributes:
        rank: rank of this site.
        step: synchronised steps so far.
        time: seconds since 1970.
        values: values by name, such as `loss`.
    """

    rank: int
    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Mishap:
    """A failed step, or a step after which the replicas differ.

    Recorders receive it whatever their `every`.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before this one.
        time: seconds since 1970.
        what: "skipped" (a gradient was not finite), "discarded" (the backward of a site raised, or
            a message was damaged), "lost" (a site died, hangs or is cut off) or "drifted"
            (parameters or buffers were found to differ between the sites).
        sites: ranks of the sites where it arose.
        layer: full name of the parameter concerned, or what was waited for; "" if unknown.
    """

    rank: int
    step: int
    time: float
    what: str
    sites: tuple[int, ...]
    layer: str


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial by `og.Auto()` of another way to share the gradients, beside the one that it kept.

    Recorders receive it whatever their `every`.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before the decision.
        time: seconds since 1970.
        methods: tried methods, as text, one per group of layers, the largest first.
        seconds: seconds of a step with them, the median at the slowest site.
        kept_seconds: likewise of a step with the methods that were kept until then.
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
    """A change of the sites that take part (`og.Star(when_lost="go on")`).

    Recorders receive it whatever their `every`.

    Attributes:
        rank: rank that this site had in the `Run`.
        step: synchronised steps before the first with these sites.
        time: seconds since 1970.
        epoch: number of changes of the sites so far.
        sites: names of the sites that take part from now on.
        lost: names of the sites that do not take part any more.
        back: names of the sites that did not take part before.
        why: why each lost site is gone, by its name, where that is known: that it was revoked, or
            was away for too long.
    """

    rank: int
    step: int
    time: float
    epoch: int
    sites: tuple[str, ...]
    lost: tuple[str, ...]
    back: tuple[str, ...]
    why: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An exchange of `og.LocalSteps(quorum=...)`: who took part in it, and who was late.

    Recorders receive it whatever their `every`. A late site reports the exchange when it arrives.
    With `og.Gossip` it is one of a site and its neighbours, and comes in steps that are recorded,
    and whenever a neighbour goes away or is back.

    Attributes:
        rank: rank of this site.
        step: exchanges before this one in which all sites took part, as in `Step`.
        time: seconds since 1970.
        number: exchanges before this one, since the session began or a state was loaded.
        took_part: sites whose changes were averaged, by name, or as "site 0" where sites have no
            names.
        late: sites that were left out, likewise. What they have changed is added to a later one.
    """

    rank: int
    step: int
    time: float
    number: int
    took_part: tuple[str, ...]
    late: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A check of `og.OnDrift` after which all sites exchange.

    Recorders receive it whatever their `every`, from every site alike. A drift of replicas is a
    `Mishap`.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before the exchange.
        time: seconds since 1970.
        checks: checks since the last exchange, this one included.
        sites: sites whose detectors saw drift, by name, or as "site 0" where sites have no names;
            none if the exchange came by `most` alone.
    """

    rank: int
    step: int
    time: float
    checks: int
    sites: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of the model on rows that a site has held out, from `session.log_eval`.

    Figures are in tuples: a value, and the bounds of its interval at 95%, (value, low, high); or
    (value,) where no interval is known. They are "accuracy", "auc", "calibration error" and what
    else was given under a name. No figure is of a single row.

    Attributes:
        rank: rank of this site.
        step: synchronised steps so far.
        time: seconds since 1970.
        rows: number of rows; 0 if not told.
        shares: share of the rows that belong to each class, by its label.
        figures: figures of the model.
        alone: likewise, of a model that this site has trained alone, on the same rows.
        gains: figures of the model minus those alone, with intervals for the same rows.
        calibration: of rows with similar predicted probabilities, (rows, mean predicted
            probability, observed share, low, high); of several classes, the probability of the
            class predicted and the share of right predictions.
    """

    rank: int
    step: int
    time: float
    rows: int
    shares: Mapping[str, float]
    figures: Mapping[str, tuple[float, ...]]
    alone: Mapping[str, tuple[float, ...]]
    gains: Mapping[str, tuple[float, ...]]
    calibration: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        """Formats the figures in a line."""
        told = [f"{self.rows:,} rows"] if self.rows else []
        gains = {f"gain in {name}": figure for name, figure in self.gains.items()}
        for name, figure in {**self.figures, **gains}.items():
            value, *interval = (f"{number:.3f}" for number in figure)
            told.append(f"{name} {value}" + (f" [{', '.join(interval)}]" if interval else ""))
        return ", ".join(told)


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """Report of what other sites can learn from this site's messages, from a step on.

    It follows the first recorded step, and every later one that differs from the one before.

    Attributes:
        rank: rank of this site.
        step: synchronised steps before the first that is known to be so.
        time: seconds since 1970.
        learn: for every parameter how it travels and what other sites learn, as in
            `session.coverage()`.
    """

    rank: int
    step: int
    time: float
    learn: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Report of what a training has released so far, by the ledger of its `og.Private`.

    It follows the first recorded step, later ones whenever a quarter more was released, and the
    end, whatever `every` is.

    Attributes:
        rank: rank of this site.
        step: synchronised steps so far.
        time: seconds since 1970.
        steps: released steps, discarded ones and those of earlier runs included.
        delta: δ.
        epsilon: ε by observer ("model", "site", "hub"), upper bounds by Rényi divergences; empty
            where it is not known.
        stop_at: budget of ε; None if there is none.
        against: observer whose ε the budget is about.
        unknown: why ε is not known; "" if it is.
    """

    rank: int
    step: int
    time: float
    steps: int
    delta: float
    epsilon: Mapping[str, float]
    stop_at: float | None = None
    against: str = "model"
    unknown: str = ""

    def __str__(self) -> str:
        """Formats the figures in a line."""
        whom = {"model": "whoever gets the model", "site": "another site", "hub": "the hub"}
        told = [f"{v:.4g} against {whom.get(name, name)}" for name, v in self.epsilon.items()]
        known = f"ε = {', '.join(told)} at δ = {self.delta:g} (by RDP)"
        budget = "" if self.stop_at is None else f"; it stops at ε = {self.stop_at:g}"
        return f"{self.steps:,} released steps: {known if told else self.unknown}{budget}"


@dataclass(frozen=True, kw_only=True)
class End:
    """End of a session: it was detached, or its program ended. A killed process sends none.

    Attributes:
        rank: rank of this site.
        step: synchronised steps so far, as far as they were recorded.
        time: seconds since 1970.
        error: type of the exception that ended the program, such as "ValueError"; "" if none did.
    """

    rank: int
    step: int
    time: float
    error: str = ""


Event = (
    Run
    | Layer
    | Step
    | Scalars
    | Evaluation
    | Disclosure
    | Mishap
    | Trial
    | Change
    | Exchange
    | Drift
    | Privacy
    | End
)
