"""Names and looks of methods, the same in every table and figure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Style = dict[str, Any]

NAMES = {
    "pooled": "pooled",
    "alone": "no sharing",
    "dense": "dense",
    "ddp": "PyTorch DDP",
    "ddp-again": "PyTorch DDP, again",
    "ddp-fp16": "PyTorch DDP, fp16",
    "auto": "auto",
    "dad": "dAD",
    "dad-activations": "dAD, activations",
    "edad": "edAD",
    "edad-raw": "edAD, raw inputs",
    "rank-dad": "rank-dAD",
    "rank-dad-plain": "rank-dAD without memory",
    "powersgd": "PyTorch PowerSGD",
    "og-powersgd": "PowerSGD",
    "first-rows": "first rows",
    "sparse": "sparse",
    "sparse-topk": "sparse, top-k",
    "sparse-blocks": "sparse, blocks",
    "sparse-random": "sparse, random",
    "sparse-random_blocks": "sparse, random blocks",
    "local-steps": "LocalSteps",
    "fedavg": "FedAvg",
    "demo": "DeMo",
    "sparseloco": "SparseLoCo",
    "muloco": "MuLoCo",
    "lordo": "LoRDO",
    "dion": "Dion",
    "dion2": "Dion2",
    "ef21-muon": "EF21-Muon",
    "acp-sgd": "ACP-SGD",
    "sparta": "SPARTA",
}
"""Names of method families, for humans."""

LOOKS: dict[str, Style] = {
    "pooled": {"color": "#111111", "linewidth": 4.5, "marker": "o"},
    "alone": {"color": "#8a8a8a", "marker": "x"},
    "dense": {"color": "#009e73", "linewidth": 3.0, "marker": "s"},
    "ddp": {"color": "#56b4e9", "linewidth": 3.0, "linestyle": (0, (2, 1.5)), "marker": "P"},
    "ddp-again": {"color": "#56b4e9", "linestyle": ":", "marker": "+"},
    "ddp-fp16": {"color": "#88ccee", "linestyle": "--", "marker": "P"},
    "auto": {"color": "#555555", "linestyle": "-.", "marker": "8"},
    "dad": {"color": "#f0b000", "marker": "D"},
    "dad-activations": {"color": "#b8860b", "linestyle": "--", "marker": "D"},
    "edad": {"color": "#cc3399", "linestyle": (0, (3, 2)), "marker": "d"},
    "edad-raw": {"color": "#882255", "linestyle": ":", "marker": "d"},
    "rank-dad": {"color": "#d34a00", "marker": "^"},
    "rank-dad-plain": {"color": "#d34a00", "linestyle": (0, (3, 2)), "marker": "<"},
    "powersgd": {"color": "#332288", "marker": "v"},
    "og-powersgd": {"color": "#0072b2", "marker": "v"},
    "first-rows": {"color": "#8a5fbf", "marker": "s"},
    "sparse": {"color": "#117733", "marker": "p"},
    "sparse-topk": {"color": "#117733", "linestyle": ":", "marker": "p"},
    "sparse-blocks": {"color": "#44aa99", "marker": "h"},
    "sparse-random": {"color": "#999933", "marker": "X"},
    "sparse-random_blocks": {"color": "#999933", "linestyle": ":", "marker": "X"},
    "local-steps": {"color": "#8c564b", "marker": "*"},
    "fedavg": {"color": "#b22222", "linewidth": 2.4, "marker": "*"},
    "demo": {"color": "#e15a97", "linestyle": "--", "marker": "1"},
    "sparseloco": {"color": "#6b8e23", "linestyle": "--", "marker": "2"},
    "muloco": {"color": "#9a3b26", "linestyle": "--", "marker": "*"},
    "lordo": {"color": "#7a7a2e", "linestyle": "--", "marker": "h"},
    "dion": {"color": "#1f9bcf", "linestyle": "--", "marker": "3"},
    "dion2": {"color": "#126a93", "linestyle": "--", "marker": "3"},
    "ef21-muon": {"color": "#c9641a", "linestyle": "--", "marker": "D"},
    "acp-sgd": {"color": "#5b4fc7", "linestyle": "--", "marker": "4"},
    "sparta": {"color": "#a67c52", "linestyle": "--", "marker": "+"},
}
"""Looks per family. Lines of exact methods coincide: wide ones lie below, so that all show."""

OTHER: Style = {"color": "#808000", "marker": "h"}
USUAL: Style = {"linewidth": 1.6, "linestyle": "-"}
_AGAIN = ((0, (4, 1.5)), (0, (1, 1)), (0, (6, 1, 1, 1)))
"""Dashes of the second, third and fourth line of one colour."""

_LIGHTEST, _FULL_RANK = 0.7, 16


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method, parsed from its name.

    Attributes:
        family: Name without settings; rank-dAD without error feedback is a family of its own.
        rank: Rank of its factors; None where it has none.
        settings: Other settings, as ``k = 50``.
    """

    family: str
    rank: int | None = None
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Method:
        """Parses ``rank-dad:rank=8``, ``powersgd-4``, ``dad``, or ``dense@8`` with ε = 8."""
        numbered = re.fullmatch(r"([^:]+)-(\d+)", name)
        if numbered:
            return cls(family=numbered[1], rank=int(numbered[2]))
        name, _, epsilon = name.partition("@")
        family, *pairs = name.split(":")
        settings = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
        rank = settings.get("rank", "")
        if rank.isdigit():
            del settings["rank"]
        if family == "rank-dad" and settings.get("error_feedback") == "None":
            family = "rank-dad-plain"
            del settings["error_feedback"]
        if family == "sparse" and (select := settings.pop("select", "threshold")) != "threshold":
            family = f"sparse-{select}"
        others = tuple(f"{key} = {value}" if value else key for key, value in settings.items())
        others += (f"ε = {epsilon}",) if epsilon else ()
        return cls(family=family, rank=int(rank) if rank.isdigit() else None, settings=others)

    @property
    def label(self) -> str:
        """Name for humans: ``rank-dAD, rank 8``."""
        name = NAMES.get(self.family, self.family)
        if self.rank is None:
            return ", ".join((name, *self.settings))
        if self.family == "first-rows":
            return ", ".join((f"first {self.rank} rows", *self.settings))
        return ", ".join((name, f"rank {self.rank}", *self.settings))

    @property
    def look(self) -> Style:
        """Look of its family, the lighter the lower its rank."""
        look = USUAL | LOOKS.get(self.family, OTHER)
        if self.rank is None:
            return look
        share = min(math.log2(max(self.rank, 1)) / math.log2(_FULL_RANK), 1)
        return look | {"color": _lighter(look["color"], _LIGHTEST * (1 - share))}


def told_apart(looks: Sequence[Style]) -> list[Style]:
    """Returns the looks, with other dashes where an earlier one has the same colour."""
    colours = [look["color"] for look in looks]
    again = [colours[:at].count(colour) for at, colour in enumerate(colours)]
    return [
        look | ({"linestyle": _AGAIN[(times - 1) % len(_AGAIN)]} if times else {})
        for look, times in zip(looks, again, strict=True)
    ]


def _lighter(colour: str, share: float) -> str:
    """Mixes ``#rrggbb`` with a share of white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
