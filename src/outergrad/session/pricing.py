"""Passing the cost and the speed of a transport to the methods of a session."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outergrad.core.cost import Whole
from outergrad.core.model import Compressors, Model
from outergrad.core.transport import Comm
from outergrad.core.types import Link
from outergrad.messages.header import Header, SlotUse
from outergrad.messages.vote import WORDS


def _whole(model: Model) -> Whole:
    params, used = model.params, (False,) * len(model.params)
    header = Header(0, 0, 0, used, (SlotUse(0, False, torch.float32),) * len(model.index))
    sizes = {name: p.nbytes for name, p in params.items()}
    dtypes = {name: p.dtype for name, p in params.items()}
    return Whole(sizes, dtypes, 8 * (header.length + WORDS))


def settle(
    compressors: Compressors,
    model: Model,
    comm: Comm,
    measured: Callable[[], Link],
    flops_per_s: Callable[[], float],
) -> None:
    """Passes the transport to the methods; measures link and machine where one goes by them."""
    settle_again(compressors, model, comm)
    sites = comm.world_size
    asking = [(e, units) for e, units in compressors.items() if e.wants_link(sites)]
    chooser = compressors.chooser if sites > 1 and model.units else None
    link = measured() if asking or chooser else None
    for compressor, units in asking:
        assert link is not None
        compressor.settle_reduce(units, sites, link)
    if chooser is not None and link is not None:
        chooser.settle(comm.cost, link, flops_per_s())


def settle_again(compressors: Compressors, model: Model, comm: Comm) -> None:
    """Passes a new transport to the methods; how low rank travels stays as it was measured."""
    for compressor, _ in compressors.items():
        compressor.settle(comm.cost, comm.capabilities)
    for compressor, units in compressors.items():
        compressor.settle_budget(units, _whole(compressors.step_of(units, model)))
