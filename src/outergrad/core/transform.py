"""The protocol of transforms, which change a site's own gradient before it is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from outergrad.core.transport import Comm
from outergrad.core.types import Factors, Slot


class Samples(NamedTuple):
    """Mapping between the samples of a batch and the rows of one use of a layer.

    Attributes:
        total: B, the number of samples.
        positions_first: whether rows are (positions, samples), flattened, and not (samples,
            positions).
        forward: number of the model's forward that the use belongs to.
        units: id of the unit of each sample, B of them; None where the loop has given none.
        groups: label of the group of each sample, B of them, for recorders; None likewise.
    """

    total: int
    positions_first: bool
    forward: int
    units: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None


class SampleRows(NamedTuple):
    """This site's rows of one product, with the sample of each row.

    Attributes:
        factors: the rows, N of them: deltas (G, N, O) and activations (G, N, I). For a lookup slot
            deltas (1, N, O) and ids (N,), which may occur several times.
        samples_N: index of the sample of each row, int64; None where the transform did not ask.
    """

    factors: Factors
    samples_N: Tensor | None = None


class Projection(Protocol):
    """Linear function that keeps of a weight's gradient what the method will send of it.

    It follows from settings and from sums that all sites have seen, of the steps before.
    """

    def coordinates(self, matrix_OI: Tensor) -> Tensor:
        """Returns the numbers that are sent of a gradient."""
        ...

    def matrix(self, coordinates: Tensor) -> Tensor:
        """Returns the gradient, (O, I), of which these numbers are all."""
        ...

    def squared_norms(self, d_BLO: Tensor, a_BLI: Tensor) -> Tensor:
        """Squared norms of the coordinates of each sample's product `d_bᵀ a_b`, (B,)."""
        ...


@dataclass(frozen=True)
class SiteGradient:
    """This site's own gradient, or the part of it that a transform receives in one call.

    Every parameter has its gradient either in `rows` or in `formed`. `outergrad.transforms` has
    the usual computations on it.

    Attributes:
        rows: rows of the products of layers with a rule that were captured, by slot. The gradient
            of the slot's weight is the product of its rows, that of its bias the sum of its deltas;
            slots of one parameter add up.
        formed: gradients that have no rows, by the full name of the parameter, in its shape.
        params: the parameters concerned, by full name; read-only.
        samples: B, the number of samples in this site's batch; 0 where the transform did not ask.
        sites: S, the number of sites in this step, over which results are averaged.
        layers: number of parts that the whole gradient has: of the calls per step, if the transform
            does not need all layers at once.
        sent: what the method will send, by the full name of a weight that has rows of one slot;
            None where the transform did not ask (`sent_only`). Norms of samples are then those of
            what is sent.
        unit_B: index of the unit of each sample, int64, from 0 on without gaps, (B,); None where
            the transform did not ask for units.
    """

    rows: Mapping[Slot, SampleRows]
    formed: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    samples: int = 0
    sites: int = 1
    layers: int = 1
    sent: Mapping[str, Projection] | None = None
    unit_B: Tensor | None = None


class GradientTransform(Protocol):
    """Changes a site's own gradient, between its capture and its compression.

    It is called once per step, even if messages are sent again, without autograd, on every site
    separately. Its input is this site's contribution to the mean over the sites, before the site's
    weight is applied: with several backward passes (`no_sync`, `every=k`) their sum. Its `repr`
    must contain its settings, as that of a frozen dataclass does: the sites compare it.

    Samples are counted along the first dimension of the first tensor that the model is called with,
    and every layer is checked to see as many. Of a loss that is a mean, as usual, the rows of a
    sample make up 1 / B of its gradient. A GradScaler is refused before its first step. The
    transform's own state, such as that of a generator, is not part of the session's state: save it
    beside, as by `og.Checkpoints(..., noise=generator)`.
    """

    @property
    def needs_samples(self) -> bool:
        """True if it must know the sample of each row. Gradients without rows are then refused."""
        ...

    @property
    def needs_all_layers(self) -> bool:
        """True if it must see the gradients of all parameters at once.

        Nothing is sent before the end of backward then. Otherwise it is called for one weight of a
        layer with its bias (and all parameters shared with them), or for one other parameter, at a
        time.
        """
        ...

    @property
    def needs_units(self) -> bool:
        """True if it must know which samples are of one unit, as a person; it may be missing.

        The loop then has to give an id for each sample (`session.units`), and a backward of a
        forward without any is refused. So are passes of one step that share a unit.
        """
        return False

    @property
    def forms(self) -> bool:
        """True if its whole result is in `formed`, as noise has no rows; it may be missing.

        Layers then travel dense, or at low rank of their formed gradients.
        """
        return False

    @property
    def adds_up(self) -> bool:
        """True if it is about the sum over the sites, all of which count alike; it may be missing.

        Then weights of sites and `session.join()` are refused. If it `forms`, so is what sends
        anything but a part of a sum: gathered payloads, and error feedback; and sites do not tell
        each other how many rows a layer had.
        """
        return False

    @property
    def sent_only(self) -> bool:
        """True if it asks what the method will send (`SiteGradient.sent`); it may be missing."""
        return False

    def __call__(self, gradient: SiteGradient) -> SiteGradient:
        """Returns the gradient to send; with `forms` all of it in `formed`.

        Without `forms` the result has the same slots, the same row counts and the same names.
        """
        ...


@runtime_checkable
class Accumulating(Protocol):
    """Further members of a transform that needs samples and allows `session.no_sync()`."""

    @property
    def accumulates(self) -> bool:
        """True if results of several backward passes may be added up."""
        ...

    def partial(self, gradient: SiteGradient) -> SiteGradient:
        """Returns what a backward adds to the result of the next one that is shared, formed."""
        ...


def accumulating(transform: object) -> Accumulating | None:
    """Returns the transform if results of several backward passes may be added up, or None."""
    allowed = isinstance(transform, Accumulating) and transform.accumulates
    return transform if allowed else None  # type: ignore[return-value]


@runtime_checkable
class Telling(Protocol):
    """Further members of a transform that learns from a sum over the sites of its own numbers.

    It decides by its settings alone whether it tells any, and how many. All sites are told the same
    sum, behind every step that counts, in one short message.
    """

    def tell(self) -> Tensor | None:
        """Returns this site's numbers of the last step, float64; None if it tells none."""
        ...

    def hear(self, total: Tensor) -> None:
        """Takes their sum over the sites, equal on all of them."""
        ...


@runtime_checkable
class Beginning(Protocol):
    """Further member of a transform whose state goes on from step to step."""

    def begin_step(self) -> None:
        """Notes that a shared step begins, in which it may be called late, or not at all."""
        ...


class Counter(Protocol):
    """Counter of what the steps of one session release, kept by a transform.

    What it says of a step follows from what all sites have counted alike.
    """

    def begin(self, comm: Comm) -> None:
        """Checks and counts a shared step, before its first message; the sites may exchange words.

        Raises:
            BudgetSpentError: at all sites: the budget has no room for it.
        """
        ...

    def show_parts(self) -> None:
        """Counts what a step has shown in sums to which some sites have added nothing."""
        ...

    def restart(self) -> None:
        """Has the sites compare their counts before the next step, as after a resume."""
        ...

    @property
    def steps(self) -> int:
        """Steps counted so far."""
        ...

    def spent(self, local: Collection[str]) -> Any:
        """Returns what was released so far, for people.

        Args:
            local: parameters that each site trains for itself.
        """
        ...

    def figures(self) -> dict[str, Any]:
        """Returns what is told of the steps so far: fields of `events.Privacy`."""
        ...


@runtime_checkable
class Counting(Protocol):
    """Further member of a transform that counts what is released."""

    def counter(self) -> Counter | None:
        """Returns a counter for a session; None if nothing is counted."""
        ...


def counter_of(transform: object) -> Counter | None:
    """Returns the counter of a transform for one session, or None."""
    return transform.counter() if isinstance(transform, Counting) else None
