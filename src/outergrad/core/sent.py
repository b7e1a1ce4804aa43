"""Messages of a site as their receivers decode them, for a tap on what it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from outergrad.core.payload import Arrived, Entries
from outergrad.core.types import Factors, Slot


class Way(Enum):
    """Receivers of a message."""

    GATHERED = "gathered"
    """Every other site has it as it was sent."""
    SUMMED = "summed"
    """It is a term of a sum over the sites: whoever adds up sees it, others the sum."""
    OWNED = "owned"
    """One site, its owner, has it as it was sent; all have what that site merges."""


class Kind(Enum):
    """Meaning of a message."""

    GRADIENT = "gradient"
    """This site's part of the mean: all of them together are what this site adds to a step."""
    SKETCH = "sketch"
    """The first of two sketches, as the part of the gradient that it stands for by itself. The
    second one is told as a gradient."""
    MERGED = "merged"
    """Mean gradient that this site has made, as its owner, of the parts of all sites."""
    BUFFER = "buffer"
    """Values of a buffer that forwards write to, as a running statistic."""
    DELTAS = "deltas"
    """Deltas below a shared part, of parts that are each site's own (`joint=True`)."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Something that leaves this site in a message, as its receivers decode it.

    Attributes:
        name: full name of the parameter, of the block, or of the buffer.
        content: gradient or buffer in its shape, or a payload as read from the message: factors
            (`og.Factors`), a matrix (G, O, I), entries, or all tensors of a block's uses.
        way: who receives it.
        step: number of the shared step, as events have it; with `og.LocalSteps` of the exchange.
        scale: factor that makes of it this site's gradient, or change of the weights.
        slot: slot of a payload; None for a whole parameter, a block and a buffer.
        kind: what it is.
        owner: site that has it as it was sent, where `way` is `OWNED`; it may be this site, and
            then it does not leave. None otherwise.
        deltas: of a block, those tensors of `content` that are the deltas of its outputs.
    """

    name: str
    content: Arrived | Sequence[Tensor]
    way: Way
    step: int
    scale: float = 1.0
    slot: Slot | None = None
    kind: Kind = Kind.GRADIENT
    owner: int | None = None
    deltas: Sequence[Tensor] = ()


def copied(sent: Sent) -> Sent:
    """Returns a copy on the CPU, for taps that keep what they are told."""
    content, deltas = _copied(sent.content), _copied(sent.deltas)
    return replace(sent, content=content, deltas=deltas)


def _copied(content: Any) -> Any:
    if content is None:
        return None
    if isinstance(content, Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, Factors):
        return Factors(*map(_copied, content))
    if isinstance(content, Entries):
        return content._replace(
            values_K=_copied(content.values_K), places_B=_copied(content.places_B)
        )
    return [_copied(t) for t in content]


class Tap(Protocol):
    """Listener that is told of everything that leaves this site: `og.distribute(..., tap=...)`.

    Any object with this method is one. Choose it to audit what a run sends; `og.FileTap` writes it
    to a file. Contents are views of messages, which the next step overwrites: copy what is to be
    kept, and change nothing. It is called where messages are made, most of them during
    `backward()`, and they wait for it. A tap that raises is dropped, with a warning.
    """

    def sent(self, sent: Sent) -> None:
        """Takes something that leaves this site."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class TappedRun:
    """Description of a distributed model, for a tap that asks for it.

    Attributes:
        model: the user's model.
        weights: shared parameters by name at which gradients are told; with `og.LocalSteps` the
            weights that the last exchange has left.
        method: the method, as text.
        local_steps: steps of each site between two exchanges; None where gradients are shared.
        site: rank of this site.
        sites: number of sites.
        transform: what changes gradients before they travel, as text; "" for nothing.
    """

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    method: str
    local_steps: int | None
    site: int
    sites: int
    transform: str = ""


@runtime_checkable
class StepTap(Tap, Protocol):
    """A tap that is told of steps, too: with these methods an object is one.

    Of a step that does not count, as one in which another site raised, it is told the begin alone.
    """

    def attached(self, run: TappedRun) -> None:
        """Learns what it listens to, before the first step."""
        ...

    def begun(self, step: int) -> None:
        """Learns that a shared step begins: what is sent from now on is of this one.

        Told once more if the step starts again because a site has other rows than expected: what
        was sent of it before is thrown away by all sites.
        """
        ...

    def ended(self, step: int) -> None:
        """Learns that a shared step has been applied."""
        ...
