"""Settings of sparse methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from outergrad.core.coding import Codecs, Wire, drops
from outergrad.methods.common import Settings, require

Select = Literal["threshold", "topk", "blocks", "random", "random_blocks"]

_FIRST_DENSITY = 0.25
_STAGES = 4
"""Stages of a warm-up; the density falls by the same factor from each to the next."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseSettings(Settings):
    """Settings of sparse methods; `Sparse` documents them."""

    density: float = 0.01
    select: Select = "threshold"
    block: int = 64
    error_feedback: bool = True
    momentum: float = 0.0
    warmup: int = 0
    seed: int = 0
    wire: Wire = ()
    always: bool = False
    bucket_bytes: int = 1 << 16
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.density <= 1, self, "density", "a number in (0, 1]")
        require(self.select in get_args(Select), self, "select", f"one of {get_args(Select)}")
        require(self.block >= 1, self, "block", "1 or more")
        require(0 <= self.momentum < 1, self, "momentum", "a number in [0, 1)")
        remembers = self.error_feedback or not self.momentum
        require(remembers, self, "momentum", "0 without error_feedback: momentum is remembered")
        require(self.warmup >= 0, self, "warmup", "a number of steps, 0 for none")
        picks = any(codec.picks for codec in self.codecs)
        require(not picks, self, "wire", "codecs that keep all values: density= leaves some out")
        summable = not self.sums or not drops(self.codecs)
        why = f"BF16() at most: select={self.select!r} adds up what is sent"
        require(summable, self, "wire", why)

    @property
    def codecs(self) -> Codecs:
        """Codecs of `wire`, as a tuple."""
        return cast(Codecs, self.wire)

    def density_at(self, step: int) -> float:
        """Returns the density of a shared step, by its number: higher during the warm-up."""
        if step >= self.warmup or self.density >= _FIRST_DENSITY:
            return self.density
        stage = step * _STAGES // self.warmup
        return _FIRST_DENSITY * (self.density / _FIRST_DENSITY) ** (stage / _STAGES)

    @property
    def sums(self) -> bool:
        """True if all sites select the same places, so that values can be summed."""
        return self.select.startswith("random")

    @property
    def chosen_together(self) -> int:
        """Number of consecutive entries that are sent or left out together."""
        return self.block if self.select.endswith("blocks") else 1
