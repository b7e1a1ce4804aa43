"""Synchronisation of buffers that forward passes write to, such as running statistics.

Constant tables and masks cost nothing: every site says in its header which buffers were written to
since the last step. Those that some site wrote to travel, as bytes, in one message that goes with
the last gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from outergrad.messages.checksum import sum_of_bits
from outergrad.messages.header import Header
from outergrad.messages.raw import has_elements, overwrite
from outergrad.step.contents import Contents

Kind = Literal["broadcast", "mean", "local"]
KINDS: tuple[Kind, ...] = ("broadcast", "mean", "local")
_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


_Seen = tuple[Tensor | None, int]
"""A buffer and its mark at the time."""


@dataclass(frozen=True, eq=False)
class RegisteredBuffer:
    """Place where a buffer is registered, with the shape and dtype that sites agreed on."""

    name: str
    module: nn.Module
    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def registered(self) -> Tensor | None:
        """Tensor that is registered now."""
        registered = self.module._buffers
        if isinstance(registered, dict):
            return registered.get(self.key)
        return getattr(self.module, self.key, None)  # a module of TorchScript

    @property
    def tensor(self) -> Tensor | None:
        """Tensor that is registered now; None if its shape or dtype is another one."""
        t = self.registered
        fits = t is not None and (t.shape, t.dtype) == (self.shape, self.dtype)
        return t if fits else None

    @property
    def mark(self) -> int:
        """Number that changes when the buffer is written to: its version."""
        return _version(self.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.shape.numel() * self.dtype.itemsize


class FrozenParameter(RegisteredBuffer):
    """A parameter that is not trained but written to by the loop, as an average of others."""

    @property
    def registered(self) -> Tensor | None:
        """Tensor that is registered now."""
        return self.module._parameters.get(self.key)

    @property
    def mark(self) -> int:
        """Sum of its bits: averages are often written past the version, by `p.data.mul_()`."""
        t = self.tensor
        return 0 if t is None else sum_of_bits(t)


Values = Mapping[RegisteredBuffer, Tensor | None]
"""Agreed values of buffers; None if the sending site no longer has the buffer."""


class SharedBuffers:
    """Buffers of a model that are synchronised.

    A buffer replaced by a tensor of another shape or dtype is each site's own from then on.

    Args:
        model: the whole model, or None if nothing is shared.
        kind: how buffers are synchronised.
        local: names of buffers that each site keeps to itself.
        frozen: names of untrained parameters that are synchronised like buffers.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        kind: Kind = "local",
        local: Collection[str] = (),
        frozen: Collection[str] = (),
    ) -> None:
        self.kind: Kind = kind
        shares = model is not None and kind != "local"
        self._places = list(_places(model, local)) if shares and model is not None else []
        self._places += _frozen(model, frozen) if shares and model is not None else []
        self._number = {place: k for k, place in enumerate(self._places)}
        self._statistics = _statistics(self._places)
        counters = self._statistics.values()
        apart = [k in self._statistics or k in counters for k in range(len(self._places))]
        self._contents = Contents(apart)
        self._late: set[int] = set()
        """Indices of buffers on a GPU that were found to be written past their version."""
        self._seen: list[_Seen] = [(None, 0)] * len(self._places)
        self._pooled: dict[RegisteredBuffer, Tensor | None] | None = None
        self._note(self._places)

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers whose shape and dtype are unchanged, in the order of the model."""
        return [t for t in self.by_name.values() if t is not None]

    @property
    def names(self) -> list[str]:
        """Names of all buffers and frozen parameters, in the order of the model."""
        return [place.name for place in self._places]

    @property
    def by_name(self) -> dict[str, Tensor | None]:
        """All buffers by name; None for one whose shape or dtype has changed."""
        buffers = [place for place in self._places if not isinstance(place, FrozenParameter)]
        return {place.name: place.tensor for place in buffers}

    def _note(self, places: Collection[RegisteredBuffer]) -> None:
        """Records the current values, which are the same on all sites."""
        tensors = {self._number[place]: place.tensor for place in places}
        for k, t in tensors.items():
            self._seen[k] = t, self._places[k].mark
        self._contents.note(tensors)

    def none_written(self) -> tuple[bool, ...]:
        """Returns the flags of a site that ran no forward."""
        return (False,) * len(self._places)

    def written(self) -> tuple[bool, ...]:
        """Returns for each buffer if it was written to since the sites agreed on it."""
        changed = self._by_version()
        for k in self._contents.changed(changed):
            changed[k] = True
            t = self._seen[k][0]
            if t is not None and t.device.type == "cuda":
                self._late.add(k)
        return tuple(changed)

    def is_written(self) -> bool:
        """True if any buffer was written to since the sites agreed on it."""
        return any(self._by_version()) or any(self.written())

    def _by_version(self) -> list[bool]:
        """Flags by versions; statistics go by the counter of PyTorch's norms, or by `training`."""
        changed = list(map(_changed, self._places, self._seen))
        for k, counter in self._statistics.items():
            trained = changed[counter] if counter is not None else self._places[k].module.training
            changed[k] = changed[k] or (trained and self._places[k].tensor is not None)
        for k in self._late:
            changed[k] = changed[k] or self._places[k].module.training
        return changed

    def pooled(self, values: Values) -> SharedBuffers:
        """Returns a copy for a site of several ranks, with the values that its ranks agreed on.

        They stand apart from the model until `take_pooled`, which is for a step that counts.
        """
        site = copy.copy(self)
        site._pooled = {}
        site.take(values)
        return site

    def take_pooled(self, site: SharedBuffers) -> None:
        """Writes the values of a copy made by `pooled` to the model."""
        if site._pooled:
            self.take(site._pooled)

    def value(self, place: RegisteredBuffer) -> Tensor | None:
        """Returns what is sent of a buffer."""
        return place.tensor if self._pooled is None else self._pooled.get(place, place.tensor)

    @torch.no_grad()
    def take(self, values: Values) -> None:
        """Writes agreed values; a buffer with None keeps its value."""
        if self._pooled is not None:
            self._pooled.update(
                {p: None if t is None else t.to(p.dtype) for p, t in values.items()}
            )
            return
        for place, value in values.items():
            _put(place, value)
        self._note(values)

    def named(self, values: Mapping[str, Tensor]) -> dict[RegisteredBuffer, Tensor | None]:
        """Maps values by name to buffers, leaving out unknown names and other shapes."""
        places = (place for place in self._places if place.name in values)
        return {p: t for p in places if (t := values[p.name]).shape == p.shape}

    def to_send(self, headers: Sequence[Header]) -> list[RegisteredBuffer]:
        """Returns the buffers that some site wrote to; the same on every site."""
        masks = zip(*(header.buffers for header in headers), strict=True)
        return [place for place, mask in zip(self._places, masks, strict=False) if any(mask)]


def _places(model: nn.Module, local: Collection[str]) -> Iterator[RegisteredBuffer]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, t in model.named_buffers():
        prefix, _, key = name.rpartition(".")
        if name not in local and has_elements(t) and t.numel():
            yield RegisteredBuffer(name, modules[prefix], key, t.shape, t.dtype)


def _frozen(model: nn.Module, names: Collection[str]) -> Iterator[RegisteredBuffer]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, p in model.named_parameters():
        prefix, _, key = name.rpartition(".")
        if name in names and p.numel():
            yield FrozenParameter(name, modules[prefix], key, p.shape, p.dtype)


def _statistics(places: Sequence[RegisteredBuffer]) -> dict[int, int | None]:
    """Maps running statistics, which PyTorch writes past their version, to their batch counter."""
    counters = {p.module: k for k, p in enumerate(places) if p.key == _COUNTER}
    found = (k for k, place in enumerate(places) if place.key in _STATISTICS)
    return {k: counters.get(places[k].module) for k in found}


def _changed(place: RegisteredBuffer, seen: _Seen) -> bool:
    before, mark = seen
    if before is not None and place.registered is before:
        return place.mark != mark
    return place.tensor is not None


def _version(t: Tensor | None) -> int:
    return 0 if t is None or t.is_inference() else t._version


def _put(place: RegisteredBuffer, value: Tensor | None) -> None:
    """Writes past the version, as PyTorch does with statistics: a graph may have saved them."""
    t = place.tensor
    if t is not None and value is not None:
        overwrite(t if t.is_inference() else t.data, value)
