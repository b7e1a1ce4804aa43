"""Who shares what: the method of every part of a model, as `PerLayer` gives it by patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from outergrad.core.protocols import Exchange, Method
from outergrad.core.types import Unit


@dataclass(frozen=True, kw_only=True)
class Local:
    """A part of the model that is each site's own: nothing of it is sent, at the start neither.

    Its parameters and buffers may differ between sites, in shape and in number, too.
    """

    def exchange(self) -> None:
        """None: nothing travels."""
        return


@dataclass(frozen=True)
class PerLayer:
    """Every parameter travels by the method of the first pattern that its full name matches.

    Attributes:
        methods: by pattern, as `{"encoder.*": og.Local(), "*": og.DAD()}`; in a pattern `*` is
            any text, `?` any character, `[ab]` one of them (fnmatch, case-sensitive).
        joint: what flows back into a `Local` part below shared ones is the mean over the sites of
            their deltas, row by row, in place of the site's own (docs/methods.md).
    """

    methods: Mapping[str, Method]
    joint: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Checks the settings."""
        if not self.methods:
            raise ValueError("PerLayer: methods={}; give a method per pattern, as {'*': og.DAD()}")
        for pattern, method in self.methods.items():
            if isinstance(method, PerLayer) or not callable(getattr(method, "exchange", None)):
                raise TypeError(
                    f"PerLayer: {pattern!r}: {method!r} is no method of a part; use og.DAD(), "
                    f"og.Dense(), og.Local(), ..., and og.LocalSteps(k, method=og.PerLayer(...)) "
                    f"around the whole"
                )
        if self.joint and any(getattr(m, "every", 1) > 1 for m in self.methods.values()):
            raise ValueError("PerLayer: joint=True averages in every backward: leave every=1")
        if self.joint and Local() not in self.methods.values():
            raise ValueError("PerLayer: joint=True; give some pattern the method og.Local()")

    def method_of(self, name: str) -> Method | None:
        """The method of a parameter, None if no pattern matches."""
        matching = (m for pattern, m in self.methods.items() if fnmatchcase(name, pattern))
        return next(matching, None)

    def unmatched(self, names: list[str]) -> list[str]:
        """Patterns that match none of these names."""
        return [p for p in self.methods if not any(fnmatchcase(name, p) for name in names)]


def is_local(method: Any, name: str) -> bool:
    """Whether what has this name is each site's own."""
    return isinstance(method, PerLayer) and isinstance(method.method_of(name), Local)


class Assignment:
    """The method of every parameter, and one exchange per method.

    Args:
        method: of the model, or `PerLayer`.
        names: full names of the parameters.

    Raises:
        ValueError: a parameter has no method, or a pattern no parameter.
        TypeError: it is no method.
    """

    def __init__(self, method: Any, names: Sequence[str]) -> None:
        if isinstance(method, PerLayer):
            self._methods = _by_pattern(method, names)
        elif callable(getattr(method, "exchange", None)):
            self._methods = dict.fromkeys(names, method)
        else:
            raise TypeError(f"method={method!r}: pass og.DAD(...), og.Dense() or another method")
        if not names or set(map(type, self._methods.values())) == {Local}:
            raise ValueError("every parameter is og.Local(): give what is shared another method")
        self._exchanges: list[tuple[Method, Exchange | None]] = []
        for method in self._methods.values():
            if all(method != known for known, _ in self._exchanges):
                self._exchanges.append((method, method.exchange()))

    def is_local(self, name: str) -> bool:
        """Whether the parameter is each site's own."""
        return isinstance(self._methods[name], Local)

    def every(self, name: str) -> int:
        """At every how many-th synchronised backward the parameter travels."""
        return getattr(self._methods[name], "every", 1)

    def exchange_of(self, name: str) -> Exchange | None:
        """What makes the gradient of the parameter global; None where it travels dense."""
        method = self._methods[name]
        return next(exchange for known, exchange in self._exchanges if known == method)

    @property
    def exchanges(self) -> list[Exchange]:
        """One per method, in the order of the parameters."""
        return [exchange for _, exchange in self._exchanges if exchange is not None]

    def check_together(self, names: Sequence[str]) -> None:
        """Checks that parameters which travel together have one method.

        Raises:
            ValueError: they have several.
        """
        first, *others = names
        for name in others:
            if self._methods[name] != self._methods[first]:
                raise ValueError(
                    f"PerLayer: {first!r} has the method {self._methods[first]!r}, {name!r} has "
                    f"{self._methods[name]!r}, but they travel together (one layer, or tied): "
                    f"give them one method"
                )

    def units_of(self, units: Sequence[Unit]) -> list[tuple[Exchange, list[Unit]]]:
        """Each exchange with its units."""
        of_unit = [self.exchange_of(unit.params[0]) for unit in units]
        pairs = list(zip(units, of_unit, strict=True))
        return [(e, [unit for unit, owner in pairs if owner is e]) for e in self.exchanges]


def _by_pattern(method: PerLayer, names: Sequence[str]) -> Mapping[str, Method]:
    methods = {name: method.method_of(name) for name in names}
    for name, found in methods.items():
        if found is None:
            raise ValueError(
                f"PerLayer: no pattern matches {name!r}: add one, as '*': og.DAD() behind the "
                f"others"
            )
    for pattern in method.unmatched(list(names)):
        raise ValueError(
            f"PerLayer: the pattern {pattern!r} matches no parameter; they are {', '.join(names)}"
        )
    return {name: found for name, found in methods.items() if found is not None}
