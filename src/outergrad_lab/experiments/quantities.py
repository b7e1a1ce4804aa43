"""Measured quantities: their names, and the format of their values."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from outergrad_lab.labels import NAMES, Method

NOTHING = "\N{EN DASH}"
_BITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
_PREFIXES = {
    "B": ((1e9, " GB"), (1e6, " MB"), (1e3, " kB")),
    "s": ((1.0, " s"), (1e-3, " ms")),
    "h": ((1.0, " h"), (1 / 60, " min"), (1 / 3600, " s")),
}


@dataclass(frozen=True)
class Quantity:
    """A measured quantity.

    Attributes:
        name: Name for headings and axes.
        unit: "B", "s" and "h" take prefixes, "%" is for shares; an error, "", is written as
            1.2e-07.
        decimals: Number of decimals; None for three digits in all.
    """

    name: str
    unit: str = ""
    decimals: int | None = None

    def write(self, mean: float, *others: float) -> tuple[str, ...]:
        """Formats a number with its unit, and others in the same unit but without it."""
        factor, form, unit = self._form(mean)
        first, *rest = (_number(factor * value, form) for value in (mean, *others))
        return first + unit, *rest

    def range(self, mean: float, low: float, high: float) -> str:
        """Formats as ``61.7 % [33.3, 90.0]``; the mean alone if all are alike."""
        shown, least, most = self.write(mean, low, high)
        return shown if least == most else f"{shown} [{least}, {most}]"

    def _form(self, mean: float) -> tuple[float, str, str]:
        """Returns a factor and a format for numbers about this large, and the unit."""
        for size, prefixed in _PREFIXES.get(self.unit, ()):
            if abs(mean) >= size:
                return 1 / size, _digits(mean / size), prefixed
        if self.unit == "s":
            return 1e6, _digits(1e6 * mean), " µs"
        if not self.unit and self.decimals is None:
            return 1, ".3g" if abs(mean) >= 0.01 else ".1e", ""
        form = _digits(mean) if self.decimals is None else f",.{self.decimals}f"
        return (100, form, " %") if self.unit == "%" else (1, form, self.unit.replace("B", " B"))


def _number(value: float, form: str) -> str:
    if math.isnan(value):
        return NOTHING
    if value == 0:
        return "0"
    return format(value, form) if math.isfinite(value) else "\N{INFINITY}"


def _digits(value: float) -> str:
    return f",.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f"


QUANTITIES = {
    "accuracy": Quantity("test accuracy", "%", 1),
    "worst_accuracy": Quantity("accuracy of the worst site", "%", 1),
    "best_accuracy": Quantity("accuracy of the best site", "%", 1),
    "auc": Quantity("test AUC", decimals=3),
    "loss": Quantity("training loss", decimals=3),
    "test_loss": Quantity("test loss", decimals=3),
    "train_loss": Quantity("training loss", decimals=3),
    "sent_bytes": Quantity("sent per step and site", "B", 0),
    "validation_loss": Quantity("validation loss", decimals=3),
    "hours": Quantity("time", "h"),
    "line_bytes": Quantity("through a site's line", "B", 1),
    "fewer_line": Quantity("fewer bytes than FedAvg", "\N{MULTIPLICATION SIGN}"),
    "quicker": Quantity("less time than FedAvg", "\N{MULTIPLICATION SIGN}"),
    "cut_s": Quantity("a cut costs", "s"),
    "spent_bytes": Quantity("sent by a site so far", "B", 0),
    "total_bytes": Quantity("sent by a site in all", "B", 0),
    "fewer": Quantity("fewer bytes than dense", "\N{MULTIPLICATION SIGN}"),
    "gap": Quantity("largest loss difference to pooled"),
    "loss_gap": Quantity("test loss above dense", decimals=4),
    "gap_share": Quantity("over the reference's", decimals=2),
    "bytes_share": Quantity("bytes to the reference's loss over its own", decimals=2),
    "steps_to": Quantity("steps to the reference's loss", decimals=0),
    "fewer_near": Quantity("fewer bytes than dense to nearly its loss", "\N{MULTIPLICATION SIGN}"),
    "seconds": Quantity("time in steps", "s"),
    "seconds_near": Quantity("time to nearly dense's loss", "s"),
    "step_s": Quantity("time of a step", "s"),
    "compute_s": Quantity("time of computing in a step", "s"),
    "error": Quantity("relative error"),
    "best_error": Quantity("least relative error of that rank"),
    "ratio": Quantity("error over the least error", decimals=3),
    "ms": Quantity("time per gradient", " ms"),
    "picked": Quantity("found of those wanted", "%", 1),
    "norm_share": Quantity("share of the norm", "%", 1),
    "objective": Quantity("objective", decimals=3),
    "psnr": Quantity("PSNR in dB", decimals=2),
    "nonzero": Quantity("codes that are not 0", "%", 1),
    "kept_rank": Quantity("rank that is kept", decimals=1),
    "effective_rank": Quantity("effective rank", decimals=1),
    "delay": Quantity("steps from a change to an exchange", decimals=1),
    "missed": Quantity("changes without an exchange", "%", 0),
    "false_alarms": Quantity("false alarms in 1,000 steady steps", decimals=1),
    "exchanges_made": Quantity("exchanges", decimals=0),
    "recovery": Quantity("steps until a site has recovered", decimals=0),
    "stream_accuracy": Quantity("accuracy before training", "%", 1),
    "whole_effective_rank": Quantity("effective rank", decimals=1),
    "counted_rank": Quantity("rank", decimals=0),
    "rank_bound": Quantity("bound of the rank", decimals=0),
    "spread": Quantity("spread over groups", "%", 0),
    "odd_ratio": Quantity("odd site over the others", decimals=2),
    "error_correlation": Quantity("rank correlation with test errors", decimals=2),
    "noise": Quantity("noise multiplier", decimals=2),
    "site_epsilon": Quantity("ε against a site", decimals=2),
    "data_back": Quantity("data that came back", "%", 0),
    "rows_back": Quantity("rows that came back", "%", 0),
    "texts_back": Quantity("texts that came back", "%", 0),
    "tokens_back": Quantity("tokens that came back", "%", 0),
    "labels_back": Quantity("labels beyond a guess", "%", 0),
    "members_named": Quantity("members named", "%", 0),
    "member_auc": Quantity("AUC of members", decimals=2),
    "member_z": Quantity("AUC of members above chance, in deviations", decimals=1),
    "false_rows": Quantity("claimed wrongly", decimals=0),
    "canary_alarms": Quantity("canaries named", decimals=0),
}
"""Quantities by the names that experiments use."""

_SETTINGS = {
    "batch_size": "batch size",
    "degree": "slope, steps or stride",
    "epsilon": "ε",
    "lr": "learning rate",
    "iterations": "power iterations",
    "rtt": "round trip",
    "family": "method",
    "label": "method",
}


def title(name: str) -> str:
    """Returns the name of a column or an axis."""
    if name in QUANTITIES:
        return QUANTITIES[name].name
    return _SETTINGS.get(name, name.replace("_", " "))


def text(name: str, value: Any) -> str:
    """Formats a setting's value below the name of the setting."""
    if value is None or value != value:
        return NOTHING
    if name == "method":
        return Method.parse(str(value)).label
    if name == "family":
        return NAMES.get(value, str(value))
    if name == "link" and (rate := re.fullmatch(r"([\d.]+)([kmg]bit)", str(value))):
        return f"{rate[1]} {_BITS[rate[2]]}"
    if name == "link" and value == "none":
        return "unshaped"
    return f"{value:g}" if isinstance(value, float) else str(value)


def heading(name: str, value: Any) -> str:
    """Formats a setting's value where it stands alone: ``2 sites``, ``rank 8``, ``relu``."""
    if isinstance(value, str) and value != NOTHING:
        return text(name, value)
    if name == "sites":
        return f"{text(name, value)} sites" if value != 1 else "1 site"
    return f"{title(name)} {text(name, value)}"
