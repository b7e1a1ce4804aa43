"""Parts of a model that every site computes again: what they are, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

UNSENDABLE = 1 << 40
"""Bytes of a block that must not be sent: more than any gradient has."""


@dataclass(frozen=True)
class Block:
    """A part of the model that every site computes again, forward and backward, for all sites.

    Attributes:
        name: of the module, or of the first and the last.
        params: full names of its trained parameters.
    """

    name: str
    params: tuple[str, ...]

    @property
    def label(self) -> str:
        """What its bytes are booked on."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Replays:
    """What a method wants to be computed again.

    Attributes:
        blocks: patterns of full names of modules.
        chains: whether chains of layers in an `nn.Sequential`, too.
        recurrent: whether `nn.RNN`, `nn.GRU` and `nn.LSTM`, too.
        raw_inputs: whether what enters the model may be sent as it is.
    """

    blocks: tuple[str, ...] = ()
    chains: bool = False
    recurrent: bool = False
    raw_inputs: bool = False


class Traced(NamedTuple):
    """What one use of a block's module leaves behind in forward.

    Attributes:
        about: plain values that its replay needs.
        tensors: what is sent of it.
        outputs: all tensors of its output.
        rebuild: the output, with others in the place of these tensors.
        fingerprint: of the floating outputs, to compare a replay with; None where all that a
            replay reads is compared otherwise.
    """

    about: Any
    tensors: list[Tensor]
    outputs: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]
    fingerprint: Tensor | None = None


class SentUse(NamedTuple):
    """One use of a block's module, as a site has sent it.

    Attributes:
        member: which of the block's modules.
        about: as in `Traced`.
        tensors: as in `Traced`; None for the one that is the output of the use before.
        fingerprint: as in `Traced`.
    """

    member: int
    about: Any
    tensors: Sequence[Tensor | None]
    fingerprint: Tensor | None = None


class SentRun(NamedTuple):
    """Uses of a block's modules of which each reads the output of the one before.

    Attributes:
        links: the uses.
        deltas: of the floating outputs of the last one.
        site: which site sent it.
        own: whether that is this one.
    """

    links: Sequence[SentUse]
    deltas: Sequence[Tensor]
    site: int = 0
    own: bool = True


class Replayer(Protocol):
    """How the modules of a block compute, and how they are computed again."""

    def trace(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """The forward of one of the modules with detached parameters, and what is sent of it."""
        ...

    def may_trace(self, member: int) -> bool:
        """Whether a trace would be right now."""
        ...

    def plain(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward as it is without outergrad."""
        ...

    def nbytes(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> int:
        """About what would be sent of a forward that returned y, had it been traced."""
        ...

    def again(self, sent: SentUse, params: Mapping[str, Tensor]) -> list[Tensor]:
        """The floating outputs of one use, with a graph to parameters, which go by full name."""
        ...

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """The sum of what all runs of all sites add to the gradients.

        Returns:
            By full name; the same to the bit from the same bytes.

        Raises:
            ReplayError: it could not be computed as in the forward of the site.
        """
        ...

    def fingerprints(
        self, exact: Sequence[SentRun], decoded: Sequence[SentRun]
    ) -> list[Tensor | None]:
        """Of what a replay of decoded runs gives, per link of every run; of links that have some.

        One that no replay is like stands for a module whose exact replay is not as its forward.

        Raises:
            ReplayError: a replay failed.
        """
        ...
