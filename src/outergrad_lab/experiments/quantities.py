"""What is measured: what it is called, and how it is written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outergrad_lab.experiments.labels import NAMES, Method

NOTHING = "\N{EN DASH}"
_TIMES, _INFINITE = "\N{MULTIPLICATION SIGN}", "\N{INFINITY}"
_BITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}

Form = tuple[float, int | str, str]
"""By what a number is multiplied, its decimals or format, and the unit behind it."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Something measured.

    Attributes:
        name: For headings and axes.
        form: How numbers about this large are written.
        unit: Of an axis: "B" and "s" take prefixes, "%" is of shares.
    """

    name: str
    form: Callable[[float], Form]
    unit: str = ""

    def write(self, mean: float, *others: float) -> tuple[str, ...]:
        """A number with its unit, and others beside it in the same unit but without it."""
        factor, decimals, unit = self.form(mean)
        form = decimals if isinstance(decimals, str) else f",.{decimals}f"
        first, *rest = (_number(factor * value, form) for value in (mean, *others))
        return first + unit, *rest


def _number(value: float, form: str) -> str:
    if math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    return format(value, form) if math.isfinite(value) else _INFINITE


def _bytes(size: float) -> Form:
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= least:
            return 1 / least, _decimals(size / least), f" {unit}"
    return 1, 0, " B"


def _seconds(seconds: float) -> Form:
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= least:
            return 1 / least, _decimals(seconds / least), f" {unit}"
    return 1e6, _decimals(1e6 * seconds), " µs"


def _decimals(value: float) -> int:
    """Those of three digits."""
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


def _times(ratio: float) -> Form:
    return 1, _decimals(ratio), _TIMES


def _ms(milliseconds: float) -> Form:
    return 1, _decimals(milliseconds), " ms"


def _small(error: float) -> Form:
    return 1, ".3g" if abs(error) >= 0.01 else ".1e", ""


def _fixed(decimals: int, factor: float = 1, unit: str = "") -> Callable[[float], Form]:
    return lambda _: (factor, decimals, unit)


_PERCENT = _fixed(1, 100, " %")

QUANTITIES = {
    "accuracy": Quantity(name="test accuracy", form=_PERCENT, unit="%"),
    "auc": Quantity(name="test AUC", form=_fixed(3)),
    "loss": Quantity(name="training loss", form=_fixed(3)),
    "test_loss": Quantity(name="test loss", form=_fixed(3)),
    "train_loss": Quantity(name="training loss", form=_fixed(3)),
    "sent_bytes": Quantity(name="sent per step and site", form=_bytes, unit="B"),
    "spent_bytes": Quantity(name="sent by a site so far", form=_bytes, unit="B"),
    "total_bytes": Quantity(name="sent by a site in all", form=_bytes, unit="B"),
    "fewer": Quantity(name="fewer bytes than dense", form=_times),
    "gap": Quantity(name="largest loss difference to pooled", form=_small),
    "seconds": Quantity(name="time in steps", form=_seconds, unit="s"),
    "step_s": Quantity(name="time of a step", form=_seconds, unit="s"),
    "compute_s": Quantity(name="time of computing in a step", form=_seconds, unit="s"),
    "error": Quantity(name="relative error", form=_small),
    "best_error": Quantity(name="least relative error of that rank", form=_small),
    "ratio": Quantity(name="error over the least error", form=_fixed(3)),
    "ms": Quantity(name="time per gradient", form=_ms, unit="ms"),
    "kept_rank": Quantity(name="rank that is kept", form=_fixed(1)),
    "effective_rank": Quantity(name="effective rank", form=_fixed(1)),
}
"""By the names that experiments use."""

_SETTINGS = {
    "batch_size": "batch size",
    "lr": "learning rate",
    "iterations": "power iterations",
    "rtt": "round trip",
    "family": "method",
    "label": "method",
}


def title(name: str) -> str:
    """What a column or an axis is called."""
    if name in QUANTITIES:
        return QUANTITIES[name].name
    return _SETTINGS.get(name, name.replace("_", " "))


def text(name: str, value: Any) -> str:
    """A setting's value where its name stands above it."""
    if value is None or value != value:
        return NOTHING
    if name == "method":
        return Method.parse(str(value)).label
    if name == "family":
        return NAMES.get(value, str(value))
    if name == "link":
        return _link(str(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(name: str, value: Any) -> str:
    """A setting's value where nothing else names it: ``2 sites``, ``rank 8``, ``relu``."""
    if name == "sites":
        return f"{text(name, value)} sites" if value != 1 else "1 site"
    if isinstance(value, str):
        return text(name, value)
    return f"{title(name)} {text(name, value)}"


def _link(name: str) -> str:
    rate = re.fullmatch(r"([\d.]+)([kmg]bit)", name)
    return f"{rate[1]} {_BITS[rate[2]]}" if rate else "unshaped" if name == "none" else name
