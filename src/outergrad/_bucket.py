"""What every message of a step has in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from outergrad._types import Comm, FactorsOf, Slot
from outergrad.comm.wire import Header, State
from outergrad.record.stats import LayerStats


class Bucket(Protocol):
    """Parameters that share a message; the same on every site."""

    params: frozenset[str]
    """All of them: when they are ready, the message is."""
    dense_params: Sequence[str]
    """Those of which `param.grad` itself travels."""

    def start(self, sender: Sender) -> Pending:
        """Sends this site's part."""
        ...


@dataclass
class Result:
    """What a message brought.

    Attributes:
        means: of what the sites had in `param.grad`, which they replace.
        additions: mean gradients from factors, to be added to what is in `param.grad`.
        state: the worst state that a site sent; if not GOOD, the rest means nothing.
        mixed: parameters that on some site also have a gradient outside their factors.
    """

    means: Mapping[str, Tensor] = field(default_factory=dict)
    additions: Mapping[str, Tensor] = field(default_factory=dict)
    state: State = State.GOOD
    mixed: list[str] = field(default_factory=list)


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> Result:
        """Blocks until it is there."""
        ...


@dataclass
class Sender:
    """What a bucket needs to know of this site and step to send.

    Attributes:
        comm: the transport.
        params: trainable parameters by name.
        header: this site's.
        headers: every site's, in the order of ranks.
        slot_index: place of each slot in the headers.
        factors_of: this site's raw rows of a slot, all its uses stacked.
        mixed: names of parameters for which autograd has a gradient of its own on this site.
        state: this site's; unless GOOD it takes part in everything and sends nothing.
        layers: bytes and seconds by layer, filled by the buckets.
    """

    comm: Comm
    params: Mapping[str, nn.Parameter]
    header: Header
    headers: Sequence[Header]
    slot_index: Mapping[Slot, int]
    factors_of: FactorsOf
    mixed: set[str]
    state: State = State.GOOD
    layers: dict[str, LayerStats] = field(default_factory=dict)

    def add(self, layer: str, travels: str, nbytes: int, seconds: float = 0.0) -> None:
        """Books bytes and seconds on a layer."""
        before = self.layers.get(layer, LayerStats(travels, 0, 0.0))
        self.layers[layer] = LayerStats(
            travels, before.sent_bytes + nbytes, before.compress_s + seconds
        )


def copy_scaled(name: str, p: nn.Parameter, out: Tensor, scale: float) -> None:
    """`out = scale * p.grad`; no gradient counts as zero, scale 0 gives zeros."""
    if p.grad is None or scale == 0.0:
        out.zero_()
    elif p.grad.is_sparse:
        raise RuntimeError(f"{name!r} has a sparse gradient: build its layer with sparse=False")
    else:
        torch.mul(p.grad, scale, out=out)
