"""Methods whose rows are encoded, for the tests of them."""

from __future__ import annotations

from typing import Any

import pytest

import outergrad as og
from covering import covering
from outergrad.wire import BF16, Int4, Int8, TopK

CODECS: dict[str, tuple[Any, ...]] = {
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "int4": (Int4(),),
    "topk": (TopK(0.3),),
    "topk, int8": (TopK(0.3), Int8()),
}
DROPPING = {label: codecs for label, codecs in CODECS.items() if codecs != (BF16(),)}
METHODS = {
    "dad": og.DAD,
    "dad raw": lambda wire: og.DAD(wire=wire, reveal="activations"),
    "gather": lambda wire: og.RankDAD(wire=wire, reduce="gather"),
    "two_way": lambda wire: og.RankDAD(wire=wire, reduce="two_way"),
    "auto": lambda wire: og.RankDAD(wire=wire),
}
WEIGHTS = ("0.weight", "3.weight")
"""Of `low_rank.model`."""

by_dropping = pytest.mark.parametrize("codecs", DROPPING.values(), ids=DROPPING)
by_sites = pytest.mark.parametrize("sites", [2, 3])
by_codecs_methods_and_sites = pytest.mark.parametrize(
    ("codecs", "method", "sites"), covering(CODECS, METHODS, [2, 3], quick=4, every=2)
)


def few(_rank: int, _step: int) -> int:
    return 6
