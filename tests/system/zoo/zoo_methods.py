"""Methods by which every model of the zoo is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo_case import Case

import outergrad as og

FULL = 1000


def blocks(case: Case) -> Any:
    """What a case names is computed again, and so is every chain."""
    return og.EDAD(blocks=case.blocks, inputs="raw", always=True)


def mixture(case: Case) -> Any:
    """A part of the model sends its rows, the rest is summed up."""
    return og.PerLayer({case.part: og.DAD(always=True, reveal="activations"), "*": og.Dense()})


EXACT: dict[str, Callable[[Case], Any]] = {
    "dense": lambda case: og.Dense(),
    "dad": lambda case: og.DAD(),
    "dad forced": lambda case: og.DAD(always=True),
    "dad raw forced": lambda case: og.DAD(always=True, reveal="activations"),
    "edad": blocks,
    "edad, chains alone": lambda case: og.EDAD(always=True),
    "rank-dad gather": lambda case: og.RankDAD(rank=FULL, reduce="gather"),
    "rank-dad two_way": lambda case: og.RankDAD(rank=FULL, reduce="two_way"),
    "rank-dad all_reduce": lambda case: og.RankDAD(rank=FULL, reduce="all_reduce"),
    "powersgd": lambda case: og.PowerSGD(rank=FULL),
    "sparse": lambda case: og.Sparse(density=1.0, always=True),
    "per layer": mixture,
}
"""Those that lose nothing, and low rank where exact gradients are fewer bytes."""

LOW_RANK: dict[str, Any] = {
    "rank-dad gather": og.RankDAD(rank=2, reduce="gather", feedback_rank=FULL),
    "rank-dad two_way": og.RankDAD(rank=2, reduce="two_way", error_feedback="dense"),
    "rank-dad all_reduce": og.RankDAD(rank=2, reduce="all_reduce", error_feedback="dense"),
    "rank-dad alternate": og.RankDAD(rank=2, reduce="alternate", error_feedback="dense"),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
    "sparse": og.Sparse(density=0.1, always=True),
    "sparse random": og.Sparse(density=0.1, select="random", always=True),
}
"""Those that send the leading triplets, and remember all the rest."""

QUICK = {"dense", "dad forced", "dad raw forced", "edad"}
"""Which of the exact ones are tried with the quick cases in every test run."""
