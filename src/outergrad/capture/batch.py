"""Samples of a batch: the count that the model was called with, and the sample of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.groups import Groups
from outergrad.capture.kept import Kept
from outergrad.capture.units import Units
from outergrad.capture.weighting import samples_in
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.linalg.sample_products import as_vectors, bias_sums, products
from outergrad.messages.raw import has_elements

_MOST = 1.5
"""Numbers in the gradients of samples that are formed early, per number in the rows of these."""


class Batch:
    """Number of samples in the current forward of the model.

    It is the first dimension of the first tensor that the model is called with.

    Args:
        units: ids that the loop gives for the samples of a forward; None if it gives none.
    """

    def __init__(self, units: Units | None = None) -> None:
        self._units = units
        self._ids: tuple[str, ...] | None = None
        self._count: int | None = None
        self._latest: int | None = None
        self._given: set[int] = set()
        self._forwards = 0
        self._swap: ClassSwap | None = None
        self._groups: Groups | None = None

    def label_by(self, groups: Groups | None) -> None:
        """Labels samples as the loop says, for recorders that ask for groups."""
        self._groups = groups

    def watch(self, model: nn.Module) -> None:
        """Counts the samples of the model's forwards from now on."""
        self._swap = ClassSwap(model, self._forward)

    def remove(self) -> None:
        """Stops counting and gives the model its own class back."""
        if self._swap is not None:
            self._swap.restore()

    @property
    def count(self) -> int | None:
        """The number of samples; None outside of the model's forward.

        In a backward, for a checkpoint that computes again, that of the latest forward.
        """
        return self._count if current_task() == NO_TASK else self._latest

    def is_given(self, t: Tensor) -> bool:
        """True if the latest forward was called with a tensor, or it is a view of one of these."""
        return _memory(t) in self._given

    def samples(self, layer: str, count: int | None, *, positions_first: bool) -> Samples:
        """Returns the positions of the samples in the rows of one use of a layer.

        Raises:
            RuntimeError: the layer's count is unknown (None) or not the model's, or the layer is
                called outside of the model's forward.
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
        labels = None if self._groups is None else self._groups.labels
        return Samples(count, positions_first, self._forwards, self._ids, labels)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._swap is not None
        if current_task() != NO_TASK:  # a checkpoint's recomputation is no new forward
            return self._swap.plain_forward(*args, **kwargs)
        self._forwards += 1
        self._count = self._latest = samples_in([*args, *kwargs.values()])
        if self._units is not None and torch.is_grad_enabled():
            self._ids = self._units.take(self._count)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._given = {_memory(t) for t in tensors}
        try:
            return self._swap.plain_forward(*args, **kwargs)
        finally:
            self._count = None


def _memory(t: Tensor) -> int:
    """Returns the address of a tensor's memory, which its views share."""
    return t.untyped_storage().data_ptr() if has_elements(t) else 0


class AnySamples:
    """Counterpart of `Batch` for recorders: accepts any number of samples per layer.

    Args:
        groups: labels of samples; None if no recorder asks for groups.
    """

    def __init__(self, groups: Groups | None = None) -> None:
        self._groups = groups

    def samples(self, layer: str, count: int | None, *, positions_first: bool) -> Samples | None:
        """Returns the same as `Batch.samples`, but None if the count is unknown."""
        if count is None:
            return None
        labels = None if self._groups is None else self._groups.labels
        return Samples(count, positions_first, 0, groups=labels)


def _nothing() -> Any:
    raise AssertionError("the rows of a use are gone once gradients by sample are formed")


class SampledUse:
    """The rows of one use of a layer, computed on demand.

    Args:
        factors: computes the rows as they are sent.
        rule: the layer's rule.
        module: the layer.
        slot: index into `Rule.slots`.
        kept: returns the activations and delta of the use.
        samples: positions of the samples in the rows.
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
        self._of = module, slot
        self._kept: Callable[[], Sequence[Tensor]] = kept
        self._formed: Mapping[Slot, SampleRows] | None = None
        self._rows_left = True

    @property
    def is_told(self) -> bool:
        """True if the layer's rule has `by_sample`."""
        return hasattr(self._rule, "by_sample")

    @property
    def has_rows(self) -> bool:
        """False once the rows are gone, because gradients by sample are formed."""
        return self._formed is None

    def __call__(self) -> Factors:
        """Returns the rows as they are sent."""
        return self._factors()

    def by_sample(self) -> SampleRows:
        """Returns the rows with the index of each row's sample."""
        return self._rule.by_sample(*self._of, Call(*self._kept()), self.samples)

    def parts(self, slot: Slot) -> Mapping[Slot, SampleRows]:
        """Returns the rows of the slot, of which some may be formed gradients, as vectors."""
        if self._formed is None:
            return {slot: self.by_sample()}
        if self._rows_left:
            return {slot._replace(bias=None): self.by_sample(), **self._formed}
        return self._formed

    @torch.no_grad()
    def form(self, slot: Slot) -> None:
        """Forms gradients of samples that take little memory: of weights instead of the rows."""
        a, d = self._kept()
        rows, total = d.numel() // max(slot.groups * slot.outputs, 1), self.samples.total
        few = total * slot.outputs * slot.inputs <= _MOST * rows * (slot.outputs + slot.inputs)
        own = getattr(self._rule, "products", None)
        if not rows or (own is None and (slot.lookup or slot.vector)):
            return
        if not few:
            if slot.bias is not None and not slot.patches and rows > total:
                self._formed = as_vectors(slot, None, bias_sums(self.by_sample(), total))
            return
        found = own(*self._of, Call(a, d)) if own else products(slot, self.by_sample(), total)
        self._formed, self._rows_left = as_vectors(slot, *found), False
        self._factors = self._kept = _nothing
