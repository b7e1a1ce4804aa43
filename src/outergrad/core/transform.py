"""What changes a site's own gradient before it travels: the protocol, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from outergrad.core.types import Factors, Slot


class Samples(NamedTuple):
    """Where the samples of a batch stand in the rows of one use of a layer.

    Attributes:
        total: B, how many samples there are.
        positions_first: whether rows are (positions, samples), flattened, and not (samples,
            positions).
        forward: which forward of the model the use was in.
    """

    total: int
    positions_first: bool
    forward: int


class SampleRows(NamedTuple):
    """This site's rows of one product, and which sample each is of.

    Attributes:
        factors: the rows, N of them: deltas (G, N, O) and activations (G, N, I). For a lookup slot
            deltas (1, N, O) and ids (N,), which may occur several times.
        samples_N: index of the sample of each row, int64; None where the transform did not ask.
    """

    factors: Factors
    samples_N: Tensor | None = None


@dataclass(frozen=True)
class SiteGradient:
    """This site's own gradient, or the part of it that a transform is given at a time.

    Every parameter has its gradient either in `rows` or in `formed`. `outergrad.transforms` has
    what is usually computed of it.

    Attributes:
        rows: of the products of layers with a rule that were captured, by slot. The gradient of
            the slot's weight is the product of its rows, that of its bias the sum of its deltas;
            slots of one parameter add up.
        formed: gradients that have no rows, by the full name of the parameter, in its shape.
        params: the parameters concerned, by full name; to be read alone.
        samples: B, how many samples this site's batch has; 0 where the transform did not ask.
    """

    rows: Mapping[Slot, SampleRows]
    formed: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    samples: int = 0


class GradientTransform(Protocol):
    """Changes a site's own gradient, between its capture and its compression.

    It is called once per step, even if messages are sent again, without autograd, on every site
    for itself. What it is given is what this site adds to the mean over the sites, before the
    site's weight: with several passes (`no_sync`, `every=k`) their sum. Its `repr` must say its
    settings, as that of a frozen dataclass does: the sites compare it.

    Samples are counted along the first dimension of the first tensor that the model is called
    with, and every layer is checked to see as many. Of a loss that is a mean, as usual, the rows
    of a sample make up 1 / B of its gradient; with a GradScaler all of it is multiplied by its
    scale. What the transform remembers, as the state of a generator, is not part of the session's
    state: save it beside, as by `og.Checkpoints(..., noise=generator)`.
    """

    needs_samples: bool
    """Whether it must know which sample each row is of. What has no rows is then refused."""
    needs_all_layers: bool
    """Whether it must see the gradient of all parameters at once: nothing is sent before the end
    of backward. Otherwise it is called for one weight of a layer with its bias (and whatever
    shares parameters with them), or for one other parameter, at a time."""
    forms: bool = False
    """Whether all that it returns is in `formed`, as noise has no rows: layers then travel dense,
    or at low rank of their formed gradients. May be missing."""

    def __call__(self, gradient: SiteGradient) -> SiteGradient:
        """Returns what is to travel instead: with `forms` all of it in `formed`.

        Otherwise with the same slots, the same number of rows of each, and the same names.
        """
        ...
