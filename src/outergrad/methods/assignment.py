"""Assignment of a method to every parameter, and one compressor per method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outergrad.core.choosing import Chooser
from outergrad.core.compressor import Compressor
from outergrad.core.protocols import Method, Policy
from outergrad.core.types import Unit
from outergrad.drift.on_drift import OnDrift
from outergrad.methods.common import is_method
from outergrad.methods.dense import DenseCompressor
from outergrad.methods.per_layer import Local, PerLayer


def is_policy(method: Any) -> bool:
    """True if the object is a policy, which gives every parameter a method."""
    return not isinstance(method, type) and callable(getattr(method, "method_of", None))


def is_local(method: Any, name: str) -> bool:
    """True if a policy gives this parameter or buffer the method `Local`."""
    return is_policy(method) and isinstance(method.method_of(name), Local)


def _no_method(value: object) -> str:
    if isinstance(value, type):
        return f"method is the class {value.__name__}: pass an object, as og.{value.__name__}(...)"
    return f"method={value!r}: pass og.DAD(...), og.Dense() or another method"


class _Everywhere(Policy):
    """Policy that gives every parameter the same method."""

    def __init__(self, method: Method) -> None:
        self._method = method

    def candidates(self, name: str) -> Sequence[Method]:
        return [self._method]

    def method_of(self, name: str, step: int = 0) -> Method:
        return self._method


class Assignment:
    """Maps every parameter to its method, and holds one compressor per method.

    Args:
        method: Method of the whole model, or a policy such as `PerLayer`.
        names: Full names of the parameters.
        buffers: Full names of the buffers, which patterns of `og.Local()` may match, too.

    Attributes:
        changes: True if methods may change during training.

    Raises:
        ValueError: A parameter has no method, its candidates contradict each other, a pattern
            matches nothing, or every parameter is `og.Local()`.
        TypeError: `method` is neither a method nor a policy.
    """

    def __init__(self, method: Any, names: Sequence[str], buffers: Sequence[str] = ()) -> None:
        if not is_policy(method) and not is_method(method):
            raise TypeError(_no_method(method))
        self._policy: Policy = method if is_policy(method) else _Everywhere(method)
        if isinstance(method, PerLayer):
            _check_patterns(method, names, buffers)
        self._candidates = {name: _distinct(self._policy, name) for name in names}
        self.changes = any(len(methods) > 1 for methods in self._candidates.values())
        self._methods = {name: self._method(name, 0) for name in names}
        if not names or set(map(type, self._methods.values())) == {Local}:
            raise ValueError("every parameter is og.Local(): give what is shared another method")
        self._compressors: list[tuple[Method, Compressor | None]] = []
        for method in (m for methods in self._candidates.values() for m in methods):
            if all(method != known for known, _ in self._compressors):
                self._compressors.append((method, self._new_exchange(method)))

    def _new_exchange(self, method: Method) -> Compressor | None:
        compressor = method.compressor()
        changing = self.changes and not isinstance(method, Local)
        return DenseCompressor() if compressor is None and changing else compressor

    def _method(self, name: str, step: int) -> Method:
        method = self._policy.method_of(name, step)
        if method is None or method not in self._candidates[name]:
            raise ValueError(
                f"{self._policy!r} gives {name!r} the method {method!r} in step {step}, which is "
                f"not among its candidates"
            )
        return method

    def is_local(self, name: str) -> bool:
        """True if the parameter stays on each site and is not shared."""
        return isinstance(self._methods[name], Local)

    def every(self, name: str) -> int | OnDrift:
        """Returns k, the parameter being shared at every k-th synchronised backward; or a drift."""
        return getattr(self._methods[name], "every", 1)

    def takes_plain(self, name: str) -> bool:
        """True if a candidate method compresses formed gradients, for weights without a rule."""
        found = [self._compressor(method) for method in self._candidates[name]]
        return any(compressor is not None and compressor.takes_plain for compressor in found)

    def takes_vectors(self, name: str) -> bool:
        """True if every candidate method compresses the formed gradients of vectors."""
        found = [self._compressor(method) for method in self._candidates[name]]
        return all(compressor is not None and compressor.takes_vectors for compressor in found)

    def exchange_of(self, name: str) -> Compressor | None:
        """Returns the compressor of the parameter's method in step 0; None if that has none."""
        return self._compressor(self._methods[name])

    def _compressor(self, method: Method) -> Compressor | None:
        return next(compressor for known, compressor in self._compressors if known == method)

    @property
    def compressors(self) -> list[Compressor]:
        """One compressor per method, in the order of the parameters."""
        return [compressor for _, compressor in self._compressors if compressor is not None]

    def check_together(self, names: Sequence[str]) -> None:
        """Checks that parameters which have to travel together have the same candidate methods.

        Raises:
            ValueError: They do not.
        """
        first, *others = names
        for name in others:
            if self._candidates[name] != self._candidates[first]:
                raise ValueError(
                    f"PerLayer: {first!r} has the method {self._told(first)}, {name!r} has "
                    f"{self._told(name)}, but they travel together (one layer, or tied): "
                    f"give them one method"
                )

    def _told(self, name: str) -> str:
        return ", then ".join(map(repr, self._candidates[name]))

    def units_of(self, units: Sequence[Unit]) -> list[tuple[Compressor, list[Unit]]]:
        """Returns each compressor with the units for which its method is a candidate."""
        pairs = [(unit, self._candidates[unit.params[0]]) for unit in units]
        return [
            (compressor, [unit for unit, methods in pairs if method in methods])
            for method, compressor in self._compressors
            if compressor is not None
        ]

    def chooser(self, units: Sequence[Unit]) -> Chooser | None:
        """Returns the policy's chooser of methods for these units; None if it has none."""
        make = getattr(self._policy, "chooser", None)
        return None if make is None else make(units, self._compressor)

    def choose(self, unit: Unit, step: int) -> Compressor:
        """Returns the compressor of a unit in a step.

        Raises:
            ValueError: Its parameters have different methods, or one that is not a candidate.
        """
        methods = {name: self._method(name, step) for name in unit.params}
        first, *others = unit.params
        for name in others:
            if methods[name] != methods[first]:
                raise ValueError(
                    f"{self._policy!r} gives {first!r} and {name!r} different methods in step "
                    f"{step}, but they travel together: give them one"
                )
        compressor = self._compressor(methods[first])
        assert compressor is not None
        return compressor


def _distinct(policy: Policy, name: str) -> list[Method]:
    """Returns the candidate methods of a parameter without duplicates.

    Raises:
        ValueError: There is none, or the candidates differ in being `Local` or in `every`.
    """
    found: list[Method] = []
    for method in policy.candidates(name):
        if method is None:
            raise ValueError(
                f"{type(policy).__name__}: no pattern matches {name!r}: add one, as "
                f"'*': og.DAD() behind the others"
            )
        if method not in found:
            found.append(method)
    local = [isinstance(method, Local) for method in found]
    if any(local) != all(local):
        raise ValueError(
            f"{name!r} is og.Local() in some steps only: a part that each site keeps to itself "
            f"has to be so in all"
        )
    if len({getattr(method, "every", 1) for method in found}) > 1:
        raise ValueError(f"{name!r} has methods with different every=: give all the same")
    return found


def _check_patterns(method: PerLayer, names: Sequence[str], buffers: Sequence[str]) -> None:
    meant = set(method.unmatched([*names, *buffers]))
    for pattern in method.unmatched(list(names)):
        if pattern in meant:
            raise ValueError(
                f"PerLayer: the pattern {pattern!r} matches no parameter; they are "
                f"{', '.join(names)}"
            )
        if not isinstance(method.methods[pattern], Local):
            raise ValueError(
                f"PerLayer: the pattern {pattern!r} matches buffers alone, which og.Local() keeps "
                f"to each site; how the others travel, og.distribute(..., buffers=) says"
            )
