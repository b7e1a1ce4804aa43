"""Handover: the common state of the sites, sent by site 0 to a site that joins while they train.

Its callers pass a sealed transport, on which the messages are encrypted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.structure import flattened, rebuilt
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.messages.raw import as_tensor, digest, from_raw, in_chunks, raw
from outergrad.replay.block_use import DTYPES, told_shape

_SOURCE = 0
_MOST_TEXT, _ABOUT_BYTES = 1 << 26, 64


@dataclass(frozen=True)
class Handover:
    """State that all sites have in common.

    Attributes:
        number: fingerprint of the session.
        step: number of synchronised steps so far.
        tensors: parameters and buffers, in an order that all sites know.
        compressors: of each compressor, the part of its state that is equal on all sites.
        optimizers: states of the optimizers that were seen to step, by the first parameter that
            each holds.
    """

    number: int
    step: int
    tensors: Sequence[Tensor]
    compressors: Sequence[StateDict]
    optimizers: Mapping[str, Any] = field(default_factory=dict)

    def give(self, comm: Comm) -> None:
        """Sends it to the joining sites; a collective that all other sites call by this method."""
        contents = self._contents(comm) if comm.rank == _SOURCE else []
        nothing, sites = torch.empty(0, dtype=torch.uint8, device=comm.device), comm.world_size
        # Every site takes part in each all_to_all, so all have to know how many there are.
        ((count,), *_) = words_of_all(comm, [len(contents)])
        for content in contents or [nothing] * count:
            parts = [content if rank in comm.coming else nothing for rank in range(sites)]
            comm.all_to_all(parts, [0] * sites).wait()

    def _contents(self, comm: Comm) -> list[Tensor]:
        """Messages in the order sent: length and digest, text (JSON), chunks of tensors."""
        structure, tensors = flattened(vars(self))
        shapes = [(DTYPES.index(t.dtype), list(t.shape)) for t in tensors]
        text = json.dumps({"about": structure, "tensors": shapes}).encode()
        about = json.dumps([len(text), digest(text, tensors)]).encode().ljust(_ABOUT_BYTES)
        chunks = [torch.cat([raw(t).to(comm.device) for t in some]) for some in in_chunks(tensors)]
        return [as_tensor(about).to(comm.device), as_tensor(text).to(comm.device), *chunks]


def taken(comm: Comm) -> Handover:
    """Receives the handover on a joining site; raises ExchangeError if it cannot be right."""
    words_of_all(comm, [0])  # the exchange of the count in `give`
    try:
        length, check = json.loads(bytes(_from_source(comm, _ABOUT_BYTES).tolist()))
        if not 0 < length < _MOST_TEXT:
            raise ValueError("too long")
        text = bytes(_from_source(comm, length).cpu().numpy())
        said = json.loads(text)
        shapes = [told_shape(code, sizes) for code, sizes in said["tensors"]]
        empty = [torch.empty(s.sizes, dtype=s.dtype, device="meta") for s in shapes]
        tensors = [t for chunk in in_chunks(empty) for t in _chunk(comm, chunk)]
        if digest(text, tensors) != check:
            raise ValueError("another checksum")
        return Handover(**rebuilt(said["about"], tensors))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        told = f"what {comm.sites[_SOURCE].called} sent of its state cannot be read: {error}"
        raise ExchangeError(told, (_SOURCE,)) from error


def _chunk(comm: Comm, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [t.nbytes for t in like]
    parts = _from_source(comm, sum(sizes)).split(sizes)
    return [from_raw(part, t.dtype, t.shape) for part, t in zip(parts, like, strict=True)]


def _from_source(comm: Comm, nbytes: int) -> Tensor:
    nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
    sizes = [nbytes if rank == _SOURCE else 0 for rank in range(comm.world_size)]
    return comm.all_to_all([nothing] * comm.world_size, sizes).wait()[_SOURCE]
