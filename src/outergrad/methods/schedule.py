"""Schedule, a policy that changes the method at given steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outergrad.core.protocols import Method
from outergrad.methods.common import is_method
from outergrad.methods.per_layer import PerLayer


@dataclass(frozen=True)
class Schedule:
    """A policy: every part of the model travels by the last method whose first step is reached.

    Choose it where the first steps of training need other gradients than the rest, as dense ones.

    What a method has not sent yet is not lost when another takes over. The next method continues
    with this residual if it has error feedback, too; otherwise the residual travels once with the
    dense gradient. Steps are shared steps, as `session.stats().step` counts them. Nothing is
    computed again (`og.EDAD`) while methods may change: such layers travel as by `og.DAD`.

    Attributes:
        methods: Method by its first step, as `{0: og.Dense(), 500: og.RankDAD(rank=4)}`; each may
            be a `PerLayer`.
    """

    methods: Mapping[int, Method | PerLayer]

    def __post_init__(self) -> None:
        steps = list(self.methods)
        if 0 not in self.methods or any(type(k) is not int or k < 0 for k in steps):
            raise ValueError(
                f"Schedule: steps {steps}; give a method from step 0 on, as "
                f"{{0: og.Dense(), 500: og.RankDAD()}}"
            )
        for step, method in self.methods.items():
            of_parts = isinstance(method, PerLayer)
            if isinstance(method, PerLayer) and method.joint:
                raise ValueError(f"Schedule: step {step}: PerLayer(joint=True) cannot be changed")
            if not of_parts and not is_method(method):
                raise TypeError(
                    f"Schedule: step {step}: {method!r} is no method of a part; use og.DAD(), "
                    f"og.Dense(), og.PerLayer({{...}}), ..."
                )

    def candidates(self, name: str) -> Sequence[Method | None]:
        """Returns all methods that a parameter may have."""
        return [_of(method, name) for method in self.methods.values()]

    def method_of(self, name: str, step: int = 0) -> Method | None:
        """Returns the method of a parameter in a step; None where no pattern matches."""
        begun = max(first for first in self.methods if first <= step)
        return _of(self.methods[begun], name)


def _of(method: Method | PerLayer, name: str) -> Method | None:
    return method.method_of(name) if isinstance(method, PerLayer) else method
