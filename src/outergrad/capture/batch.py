"""The samples of a batch: how many the model was called with, and which rows are of which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.kept import Kept
from outergrad.capture.weighting import samples_in
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors


class Batch:
    """How many samples the forward of the model that runs now is about.

    That is the first dimension of the first tensor that the model is called with.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._forwards = 0
        self._swap: ClassSwap | None = None

    def watch(self, model: nn.Module) -> None:
        """Counts the samples of its forwards from now on."""
        self._swap = ClassSwap(model, self._forward)

    def remove(self) -> None:
        """Counts no more."""
        if self._swap is not None:
            self._swap.restore()

    def samples(self, layer: str, count: int | None, *, positions_first: bool) -> Samples:
        """Where the samples stand in the rows of a layer that saw so many.

        Raises:
            RuntimeError: the layer is not told or sees other samples than the model, or is called
                by itself.
        """
        if count is None:
            raise RuntimeError(
                f"{layer!r}: which sample each row is of is not known (a PackedSequence?), and the "
                f"transform needs it: pad the sequences, or make its parameters og.Local()"
            )
        if self._count is None:
            raise RuntimeError(
                f"{layer!r} is called outside of the model's forward, with a batch of which "
                f"nothing is known, and the transform needs samples: call the model itself, with "
                f"a tensor whose first dimension counts them"
            )
        if count != self._count:
            raise RuntimeError(
                f"{layer!r} sees {count} samples, the model was called with {self._count}: the "
                f"transform needs the gradient of each, so keep the samples apart in the first "
                f"dimension of what layers are called with, without flattening others into it"
            )
        return Samples(count, positions_first, self._forwards)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._swap is not None
        if current_task() != NO_TASK:  # a recomputation taps nothing new
            return self._swap.plain_forward(*args, **kwargs)
        self._forwards += 1
        self._count = samples_in([*args, *kwargs.values()])
        try:
            return self._swap.plain_forward(*args, **kwargs)
        finally:
            self._count = None


class AnySamples:
    """How many samples each layer is called with, whatever the model was: to be looked at alone."""

    def samples(self, layer: str, count: int | None, *, positions_first: bool) -> Samples | None:
        """As `Batch.samples`; None where it is not known."""
        return None if count is None else Samples(count, positions_first, 0)


class SampledUse:
    """The rows of one use of a layer, which are computed when they are asked for.

    Args:
        factors: computes them as they travel.
        rule: of the layer.
        module: the layer.
        slot: which of its products.
        kept: gives what the use left behind: activations and delta.
        samples: where its samples stand.
    """

    def __init__(
        self,
        factors: Callable[[], Factors],
        rule: Any,
        module: nn.Module,
        slot: int,
        kept: Kept,
        samples: Samples,
    ) -> None:
        self._factors, self._rule, self.samples = factors, rule, samples
        self._of, self._kept = (module, slot), kept

    @property
    def is_told(self) -> bool:
        """Whether the rule of the layer tells samples apart."""
        return hasattr(self._rule, "by_sample")

    def __call__(self) -> Factors:
        """The rows as they travel."""
        return self._factors()

    def by_sample(self) -> SampleRows:
        """Each row with its sample."""
        return self._rule.by_sample(*self._of, Call(*self._kept()), self.samples)
