"""Methods by patterns of names (`PerLayer`), and parts that stay on their site (`Local`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from outergrad.core.protocols import Method
from outergrad.methods.common import is_method

_JOINT = (
    "PerLayer(joint=True) is deprecated and will be removed: leave it out, so that each site's own "
    "part follows its own loss, or share that part, too, by og.RankDAD(...) or og.DAD() instead of "
    'og.Local() (docs/benchmarks.md, "Encoders of one\'s own")'
)


@dataclass(frozen=True, kw_only=True)
class Local:
    """A part of the model that each site keeps to itself: it is not sent even at the start.

    Choose it, in an `og.PerLayer`, for layers that must not leave a site or differ between sites.
    Its parameters and buffers may differ between sites, in shape and in number, too.
    """

    def compressor(self) -> None:
        """Returns None: nothing travels."""
        return


@dataclass(frozen=True)
class PerLayer:
    """Every parameter travels by the method of the first pattern that its full name matches.

    Choose it where parts of a model are of different kinds, or some stay on their site.

    Attributes:
        methods: Method by pattern, as `{"encoder.*": og.Local(), "*": og.DAD()}`; in a pattern `*`
            is any text, `?` any character, `[ab]` one of them (fnmatch, case-sensitive).
        joint: True if a `Local` part below shared ones receives, in backward, the mean over the
            sites of their deltas, row by row, instead of the site's own (docs/methods.md).
            Deprecated: by what was measured it loses to both alternatives.
    """

    methods: Mapping[str, Method]
    joint: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not self.methods:
            raise ValueError("PerLayer: methods={}; give a method per pattern, as {'*': og.DAD()}")
        for pattern, method in self.methods.items():
            if isinstance(method, PerLayer) or not is_method(method):
                raise TypeError(
                    f"PerLayer: {pattern!r}: {method!r} is no method of a part; use og.DAD(), "
                    f"og.Dense(), og.Local(), ..., and og.LocalSteps(k, method=og.PerLayer(...)) "
                    f"around the whole"
                )
        if self.joint and any(getattr(m, "every", 1) != 1 for m in self.methods.values()):
            raise ValueError("PerLayer: joint=True averages in every backward: leave every=1")
        if self.joint and Local() not in self.methods.values():
            raise ValueError("PerLayer: joint=True; give some pattern the method og.Local()")
        if self.joint:
            warnings.warn(_JOINT, FutureWarning, stacklevel=3)

    def candidates(self, name: str) -> Sequence[Method | None]:
        """Returns the one method that a parameter has."""
        return [self.method_of(name)]

    def method_of(self, name: str, step: int = 0) -> Method | None:
        """Returns a parameter's method, the same in all steps; None if no pattern matches."""
        matching = (m for pattern, m in self.methods.items() if fnmatchcase(name, pattern))
        return next(matching, None)

    def unmatched(self, names: list[str]) -> list[str]:
        """Returns the patterns that match none of these names."""
        return [p for p in self.methods if not any(fnmatchcase(name, p) for name in names)]
