"""A small exchange through gloo itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from outergrad.tools.doctor.board import Board
from outergrad.tools.doctor.bounded import bounded
from outergrad.tools.doctor.findings import Finding, named, ok, problem

LIMIT_S = 10.0
_TURNS = 5


def exchange(board: Board) -> tuple[float | None, str | None]:
    """Sums one number over all sites, as a training does.

    Returns:
        Seconds of the quickest sum, or why there is none.
    """
    try:
        return bounded(lambda: _quickest(board), 2 * LIMIT_S), None
    except (RuntimeError, TimeoutError) as error:
        return None, str(error).splitlines()[0]


def _quickest(board: Board) -> float:
    store = PrefixStore("gloo", board.store)
    group = dist.ProcessGroupGloo(store, board.rank, board.sites, timedelta(seconds=LIMIT_S))
    return min(_sum_s(group) for _ in range(_TURNS))


def _sum_s(group: dist.ProcessGroupGloo) -> float:
    began_s = time.perf_counter()
    group.allreduce([torch.ones(1)]).wait()  # pyright: ignore[reportAttributeAccessIssue]
    return time.perf_counter() - began_s


def check_group(told: Mapping[int, Sequence[float | str | None]], ranks: Sequence[int]) -> Finding:
    """Whether gloo has joined all sites.

    Args:
        told: What `exchange` returned at each site.
        ranks: All sites.
    """
    failed = [rank for rank in ranks if rank not in told or told[rank][1]]
    if not failed:
        slowest_s = max(float(told[rank][0] or 0.0) for rank in ranks)
        return ok("gloo", f"joins all sites; a sum over them takes {1e3 * slowest_s:.1f} ms")
    why = next((told[rank][1] for rank in failed if rank in told), "no answer")
    return problem(
        "gloo",
        f"does not join {named(failed)} with the others: {why}",
        "name the interface that leads to the other sites in GLOO_SOCKET_IFNAME, at every site",
    )
