"""Blocks: parts of a model that every site replays (recomputes) instead of receiving gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

UNSENDABLE = 1 << 40
"""Announced bytes of a block that must not be sent: larger than any gradient."""


@dataclass(frozen=True)
class Block:
    """A part of the model whose forward and backward every site recomputes for all sites.

    Attributes:
        name: full name of the module, or of the first and the last module of a chain.
        params: full names of its trained parameters.
    """

    name: str
    params: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name under which the statistics book the block's bytes."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class Replays:
    """The parts of a model that a method wants to have recomputed on every site.

    Attributes:
        blocks: patterns of full names of modules.
        chains: whether chains of layers in an `nn.Sequential` are recomputed, too.
        recurrent: whether `nn.RNN`, `nn.GRU` and `nn.LSTM` are recomputed, too.
        raw_inputs: whether the model's own inputs may be sent unchanged.
    """

    blocks: tuple[str, ...] = ()
    chains: bool = False
    recurrent: bool = False
    raw_inputs: bool = False


class Traced(NamedTuple):
    """Record of one forward call of a block's module.

    Attributes:
        about: plain values that its replay needs.
        tensors: tensors that are sent to the other sites.
        outputs: all tensors of the module's output.
        rebuild: returns the module's output with the given tensors in place of `outputs`.
        fingerprint: of the floating-point outputs, to compare a replay with; None where everything
            that a replay reads is compared in another way.
    """

    about: Any
    tensors: list[Tensor]
    outputs: list[Tensor]
    rebuild: Callable[[Sequence[Tensor]], Any]
    fingerprint: Tensor | None = None


class SentUse(NamedTuple):
    """One forward call of a block's module, as a site has sent it.

    Attributes:
        member: index of the module within the block.
        about: as in `Traced`.
        tensors: as in `Traced`; None stands for the output of the previous call in the run.
        fingerprint: as in `Traced`.
    """

    member: int
    about: Any
    tensors: Sequence[Tensor | None]
    fingerprint: Tensor | None = None


class SentRun(NamedTuple):
    """Consecutive calls of a block's modules; each reads the output of the previous one.

    Attributes:
        links: the calls.
        deltas: gradients with respect to the floating-point outputs of the last call.
        site: the site that sent the run.
        own: whether this site sent it.
    """

    links: Sequence[SentUse]
    deltas: Sequence[Tensor]
    site: int = 0
    own: bool = True


class Replayer(Protocol):
    """The computation of a block's modules: the traced forward, and its replay on every site."""

    def trace(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """Runs a module's forward with detached parameters; returns its record for the replay."""
        ...

    def may_trace(self, member: int) -> bool:
        """True if a trace of the module would be correct now."""
        ...

    def plain(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module's ordinary forward, as without outergrad."""
        ...

    def nbytes(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> int:
        """Returns about how many bytes would be sent if the forward that returned y were traced."""
        ...

    def again(self, sent: SentUse, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Replays one call: its floating-point outputs, with a graph to params (by full name)."""
        ...

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """Replays all runs and returns the sum of their gradients.

        Returns:
            Gradients by full name. They are equal to the bit if the bytes sent are.

        Raises:
            ReplayError: a run could not be recomputed as in the forward of its site.
        """
        ...

    def fingerprints(
        self, exact: Sequence[SentRun], decoded: Sequence[SentRun]
    ) -> list[Tensor | None]:
        """Returns the fingerprint of each replayed call of the decoded runs; None if it has none.

        A fingerprint that no replay can equal marks a module whose replay of the exact runs (before
        encoding) already differs from its forward.

        Raises:
            ReplayError: a replay failed.
        """
        ...
