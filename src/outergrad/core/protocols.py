"""The protocols of outergrad's extension points: rules, methods, policies and recorders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from outergrad.core.compressor import Compressor
from outergrad.core.types import Call, Factors, Slot
from outergrad.events import Event


class TapFn(Protocol):
    """Marks the output of a product, so that its factors are captured in backward.

    Where a transform tells samples apart, it has the attributes `samples`, the number B of samples
    that the model was called with, None outside of its forward, `layer`, the layer's full name,
    and `is_given(t)`, true of a tensor that the model was called with.
    """

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
        """Returns y; its delta will be captured together with a for the layer's slot.

        Args:
            y: output of the product, of any shape; nothing else may change it in place.
            a: the tensor that `Rule.factors` needs besides delta.
            slot: index into `Rule.slots`.
            rows: N of this use; None for `y.numel() // (G * O)`.
            samples: B, the number of samples of the batch that the rows belong to; None if unknown.
            positions_first: whether the rows are (positions, samples), flattened, and not
                (samples, positions).
        """
        ...


class Rule(Protocol):
    """Computation and factors of one type of layer; independent of communication.

    A rule that tells samples apart, for transforms that need them, also has `by_sample(module,
    slot, call, samples) -> SampleRows`: as `factors`, but no row is of several samples. It may have
    `products(module, slot, call)`, too, where there is a quicker way to the product of each sample,
    (B, G, O, I), than from its rows; it returns these, and with a bias sums of deltas, (B, G, O).
    """

    owns: tuple[str, ...]
    """Names of child modules whose parameters this rule handles."""

    def objection(self, module: Any) -> str | None:
        """Returns the reason why this module must travel dense, or None.

        Raises:
            ValueError: the module cannot be trained over several sites at all.
        """
        ...

    def slots(self, module: Any, name: str) -> Sequence[Slot]:
        """Returns the layer's outer products, in an order that is the same on every site."""
        ...

    def forward(self, module: Any, tap: TapFn, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer's forward with detached parameters, every product passed through tap."""
        ...

    def rows(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[int]:
        """Returns N per slot that `forward` with these arguments would tap."""
        ...

    def factors(self, module: Any, slot: int, call: Call) -> Factors:
        """Returns the rows of one use of the layer."""
        ...


Rules = Mapping[type[nn.Module], Rule]


class Method(Protocol):
    """A frozen dataclass of settings that the user passes to `distribute`."""

    def compressor(self) -> Compressor | None:
        """Returns a new compressor, or None where every parameter travels dense."""
        ...


class Policy(Protocol):
    """Assigns each parameter a method per step. Pure: the answers are the same on every site."""

    def candidates(self, name: str) -> Sequence[Method | None]:
        """Returns all methods that a parameter may ever have; None stands for no method."""
        ...

    def method_of(self, name: str, step: int = 0) -> Method | None:
        """Returns the method of a parameter in a synchronised step, by its number, or None.

        Parameters of one layer, and tied ones, must have the same method.
        """
        ...


class Recorder(Protocol):
    """Receiver of a session's events.

    The following members are optional. An attribute `every` limits the steps that are recorded to
    those whose number it divides. `budget` is the share of a step's time that measuring and writing
    it may take: layers that do not fit are measured another time. With `samples` True the recorder
    gets figures of single samples, too, which are private to the site; with `groups` True those of
    groups of samples. A method `close()` is called
    when the session ends.
    """

    def record(self, event: Event) -> None:
        """Receives one event; called at the end of backward, on the training thread."""
        ...


FactorsOf = Callable[[Slot, int], Factors]
