"""Auto, the policy that chooses methods by measured step times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from outergrad.core.compressor import Compressor
from outergrad.core.protocols import Method
from outergrad.core.types import Unit
from outergrad.messages.raw import digest
from outergrad.methods.auto.chooser import AutoChooser
from outergrad.methods.common import is_method
from outergrad.methods.dad import DAD
from outergrad.methods.dense import Dense
from outergrad.methods.per_layer import Local


@dataclass(frozen=True, repr=False)
class Auto:
    """A policy that finds out in training with which method steps are shortest.

    The default of `og.distribute`: choose it where you do not want to choose a method yourself.

    It chooses a method for each kind and size of layers. It tries `og.Dense()` and `og.DAD()`,
    which are exact and show no more of a site than its gradient, and the methods in `among`. A
    forecast from the measured link and machines says which to begin with and which are worth a
    trial. In a trial two of them take turns. The new one is kept only if it is measurably faster at
    the slowest site. All sites choose alike.

    Two runs may choose differently, and then differ in rounding. If a run must repeat to the bit,
    name its method, or pass what an earlier run chose: `og.Auto(frozen=choice)`. With `og.EDAD` in
    `among` nothing is computed again: such layers travel as by `og.DAD`.

    Attributes:
        among: Further methods to try, as those that are not exact: only the user knows whether they
            may be used.
        looking: Share of the training time that trials may add.
        every: k: gradients are shared at every k-th synchronised backward pass only, as in
            `og.Dense`.
        frozen: Method of each parameter by its full name, as `session.choice()` returned it; then
            nothing is tried.
    """

    among: Sequence[Method] = ()
    _: KW_ONLY
    looking: float = 0.01
    every: int = 1
    frozen: Mapping[str, Method] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "among", tuple(self.among))
        for method in [*self.among, *(self.frozen or {}).values()]:
            whole = not is_method(method) or isinstance(method, Local)
            if whole:
                raise TypeError(
                    f"Auto: {method!r} is no method that can be chosen: use og.RankDAD(...), "
                    f"og.PowerSGD(...), og.Sparse(...) or another of gradients"
                )
            if getattr(method, "every", 1) != self.every:
                raise ValueError(
                    f"Auto: {method!r} has another every= than Auto, {self.every}: give all the "
                    f"same"
                )
        if not 0 < self.looking <= 1:
            raise ValueError(f"Auto: looking={self.looking!r}; use a share above 0, as 0.01")

    def __repr__(self) -> str:
        """Returns the same text on every site, because sites compare it."""
        if self.frozen is not None:
            each = sorted((name, repr(method)) for name, method in self.frozen.items())
            counts = Counter(text for _, text in each).items()
            told = ", ".join(f"{count} x {text}" for text, count in sorted(counts))
            return f"Auto(frozen={digest(repr(each).encode()):x}: {told})"
        settings = {"looking": 0.01, "every": 1}
        told = [f"among={list(self.among)!r}"] if self.among else []
        told += [
            f"{name}={getattr(self, name)!r}"
            for name, default in settings.items()
            if getattr(self, name) != default
        ]
        return f"Auto({', '.join(told)})"

    @property
    def methods(self) -> list[Method]:
        """All methods to choose among, without duplicates."""
        found: list[Method] = [Dense(every=self.every), DAD(every=self.every)]
        found += [method for k, method in enumerate(self.among) if method not in self.among[:k]]
        return found[:2] + [method for method in found[2:] if method not in found[:2]]

    def candidates(self, name: str) -> Sequence[Method]:
        """Returns all methods that a parameter may have."""
        return self.methods if self.frozen is None else [self._frozen(self.frozen, name)]

    def method_of(self, name: str, step: int = 0) -> Method:
        """Returns the method of a parameter at the start; later a `chooser` decides."""
        return DAD(every=self.every) if self.frozen is None else self._frozen(self.frozen, name)

    def _frozen(self, frozen: Mapping[str, Method], name: str) -> Method:
        if name not in frozen:
            raise ValueError(
                f"Auto(frozen=...): nothing was chosen for {name!r}: pass what session.choice() "
                f"returned for the same model"
            )
        return frozen[name]

    def chooser(
        self, units: Sequence[Unit], compressor_of: Callable[[Method], Compressor]
    ) -> AutoChooser | None:
        """Returns the chooser of one session; None if `frozen` leaves nothing to choose."""
        if self.frozen is not None:
            return None
        methods = self.methods
        return AutoChooser(units, methods, list(map(compressor_of, methods)), self.looking)
