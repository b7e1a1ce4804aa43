"""The protocols between the rooms of outergrad: what a rule, a method, a recorder must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from outergrad.core.compressor import Compressor
from outergrad.core.types import Call, Factors, Slot
from outergrad.events import Event


class TapFn(Protocol):
    """Marks the output of a product, so that its factors are captured in backward."""

    def __call__(
        self,
        y: Tensor,
        a: Tensor,
        slot: int = 0,
        rows: int | None = None,
        *,
        samples: int | None = None,
        positions_first: bool = False,
    ) -> Tensor:
        """Returns y, whose delta will be captured together with a for the layer's slot.

        Args:
            y: output of the product, of any shape; changed in place by nobody else.
            a: what `Rule.factors` needs besides delta.
            slot: index into `Rule.slots`.
            rows: N of this use; None for `y.numel() // (G * O)`.
            samples: B, how many samples of the batch the rows are of; None where it is not known.
            positions_first: whether the rows are (positions, samples), flattened, and not
                (samples, positions).
        """
        ...


class Rule(Protocol):
    """How one type of layer computes and what its factors are; knows no communication.

    A rule that tells samples apart, for transforms that need them, also has `by_sample(module,
    slot, call, samples) -> SampleRows`: as `factors`, but no row is of several samples.
    """

    owns: tuple[str, ...]
    """Names of child modules whose parameters this rule handles."""

    def objection(self, module: Any) -> str | None:
        """Why this module must travel dense, or None.

        Raises:
            ValueError: the module cannot be trained over several sites at all.
        """
        ...

    def slots(self, module: Any, name: str) -> Sequence[Slot]:
        """The layer's outer products, in an order that is the same on every site."""
        ...

    def forward(self, module: Any, tap: TapFn, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward with detached parameters, every product passed through tap."""
        ...

    def rows(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int]:
        """N per slot that `forward` with these arguments would tap."""
        ...

    def factors(self, module: Any, slot: int, call: Call) -> Factors:
        """The rows of one use of the layer."""
        ...


Rules = Mapping[type[nn.Module], Rule]


class Method(Protocol):
    """A frozen dataclass of settings that the user passes to `distribute`."""

    def compressor(self) -> Compressor | None:
        """A new compressor, or None where every parameter travels dense."""
        ...


class Policy(Protocol):
    """Which method every parameter has in a step. Pure: the same answer on every site."""

    def candidates(self, name: str) -> Sequence[Method | None]:
        """All methods that a parameter may ever have; None for none."""
        ...

    def method_of(self, name: str, step: int = 0) -> Method | None:
        """The method of a parameter in a shared step, by its number; None for none.

        Parameters of one layer, and tied ones, must have the same.
        """
        ...


class Recorder(Protocol):
    """Anything that wants to know what happens.

    An attribute `every` thins the steps that it is told of, to those whose number it divides;
    `budget` is the share of the time of a step that measuring and writing one may take: layers
    that do not fit are measured another time; with `samples` True it hears of single samples, too,
    which are nobody else's business. A method `close()` is called when the session ends. All of
    these may be missing.
    """

    def record(self, event: Event) -> None:
        """Takes one event; called at the end of backward, on the training thread."""
        ...


FactorsOf = Callable[[Slot, int], Factors]
