"""Making replicas equal that may differ: parameters, buffers, states of optimizers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outergrad.comm.agree import all_came
from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.sites import Site
from outergrad.core.structure import flattened, rebuilt
from outergrad.core.transport import Comm
from outergrad.messages.raw import as_tensor, digest, from_raw, in_chunks, overwrite, raw
from outergrad.replay.block_use import DTYPES, told_shape

_MOST_TEXT = 1 << 24


@dataclass(frozen=True)
class ReplicaState:
    """State that must be equal on all sites.

    Attributes:
        parameters: shared parameters, in an order that all sites know.
        buffers: shared buffers, in an order that all sites know; made equal only if all sites have
            the same dtypes and shapes, as some may have been replaced.
        optimizers: optimizers known here, by the first parameter that they hold.
        names: names of the shared parameters, by identity; the state of others is left alone.
        remedy: what to do about an optimizer that this site has not seen step.
    """

    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    optimizers: Mapping[str, Optimizer]
    names: Mapping[int, str]
    remedy: str

    @torch.no_grad()
    def make_equal(self, comm: Comm, source: int) -> bool:
        """Overwrites the state by that of the site `source`, if two sites differ.

        Returns:
            True if two sites differed.

        Raises:
            ExchangeError: what was received is not what that site has.
        """
        structure, parts = flattened(self.optimizer_states)
        told = json.dumps({"states": structure, "tensors": [_described(t) for t in parts]})
        layout = str([(t.dtype, t.shape) for t in self.buffers])
        words = [digest(b"", self.parameters), digest(told.encode(), parts)]
        words += [digest(layout.encode(), self.buffers), digest(layout.encode())]
        words += [len(told.encode()) if self.optimizers else 0]
        words_S = words_of_all(comm, words)
        alike = all(theirs[3] == words_S[0][3] for theirs in words_S)
        compared = 3 if alike else 2
        if all(theirs[:compared] == words_S[0][:compared] for theirs in words_S):
            return False
        tensors = [*self.parameters, *(self.buffers if alike else ())]
        for t, new in zip(tensors, _sent(comm, source, tensors), strict=True):
            overwrite(t, new)
        all_came(comm, digest(b"", tensors), f"what {comm.sites[source].called} sent", source)
        if letters := words_S[source][4]:
            self._take(comm, source, told, letters, parts)
        return True

    def _take(
        self, comm: Comm, source: int, told: str, letters: int, parts: Sequence[Tensor]
    ) -> None:
        if not 0 < letters <= max(_MOST_TEXT, 4 * len(told)):
            raise ExchangeError(
                f"{comm.sites[source].called} announced {letters} bytes of optimizer states"
            )
        ours = as_tensor(told.encode())
        text = _from_source(comm, source, ours, letters).cpu().numpy().tobytes()
        mine = comm.rank == source
        states, shapes = (None, parts) if mine else _read(text, comm.sites[source])
        found = _sent(comm, source, shapes)
        all_came(comm, digest(b"", found), f"what {comm.sites[source].called} sent", source)
        if mine:
            return
        try:
            self._load(rebuilt(states, found))
        except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
            what = f"the optimizer states of {comm.sites[source].called}"
            raise ExchangeError(f"{what} do not fit this site's: {error}") from error

    @property
    def optimizer_states(self) -> dict[str, Any]:
        """State of each optimizer known here, by the first parameter that it holds."""
        return {name: self._state(one) for name, one in self.optimizers.items()}

    def take_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Loads into an optimizer the state of one that held the same parameters."""
        self._load_into(optimizer, state)

    def _state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the settings of an optimizer's groups, and its state of shared parameters."""
        groups = [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        shared = {self.names[id(p)]: p for p in _held(optimizer) if id(p) in self.names}
        state = {n: dict(optimizer.state[p]) for n, p in shared.items() if p in optimizer.state}
        return {"groups": groups, "state": state}

    def _load(self, states: Mapping[str, Any]) -> None:
        unknown = sorted(states.keys() - self.optimizers.keys())
        if unknown:
            warnings.warn(
                f"this site has not seen the optimizer of {unknown[0]!r} step, so its state is not "
                f"that of the other sites: {self.remedy}",
                stacklevel=2,
            )
        for name in states.keys() & self.optimizers.keys():
            self._load_into(self.optimizers[name], states[name])

    def _load_into(self, optimizer: Optimizer, found: Mapping[str, Any]) -> None:
        own = optimizer.state_dict()
        for place, p in enumerate(_held(optimizer)):
            if id(p) in self.names:
                own["state"].pop(place, None)
                if self.names[id(p)] in found["state"]:
                    own["state"][place] = found["state"][self.names[id(p)]]
        for group, settings in zip(own["param_groups"], found["groups"], strict=True):
            group.update(settings)
        optimizer.load_state_dict(own)


def _read(text: bytes, source: Site) -> tuple[Any, list[Tensor]]:
    """Decodes optimizer states and meta tensors of their shapes; else raises ExchangeError."""
    try:
        said = json.loads(text)
        shapes = [told_shape(code, sizes) for code, sizes in said["tensors"]]
        return said["states"], [torch.empty(s.sizes, dtype=s.dtype, device="meta") for s in shapes]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        what = f"the optimizer states of {source.called} cannot be read"
        raise ExchangeError(f"{what}: {type(error).__name__}") from error


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plain(value: Any) -> Any:
    """Returns the value if it can be encoded for other sites, else None."""
    try:
        flattened(value)
    except TypeError:
        return None
    return value


def _described(t: Tensor) -> tuple[int, list[int]]:
    return DTYPES.index(t.dtype), list(t.shape)


def _sent(comm: Comm, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of the site `source`, of these shapes; many in one message."""
    return [new for chunk in in_chunks(tensors) for new in _sent_chunk(comm, source, chunk)]


def _sent_chunk(comm: Comm, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    sizes = [t.nbytes for t in tensors]
    if not sum(sizes):
        return [torch.empty(t.shape, dtype=t.dtype, device=comm.device) for t in tensors]
    ours = torch.empty(0, dtype=torch.uint8)
    if comm.rank == source:
        ours = torch.cat([raw(t).to(comm.device) for t in tensors])
    parts = _from_source(comm, source, ours, sum(sizes)).split(sizes)
    pairs = zip(parts, tensors, strict=True)
    return [from_raw(part, t.dtype, t.shape) for part, t in pairs]


def _from_source(comm: Comm, source: int, ours: Tensor, nbytes: int) -> Tensor:
    """All-gathers the bytes of one site; the others send one byte, which nobody reads."""
    sizes = [nbytes if rank == source else 1 for rank in range(comm.world_size)]
    own = ours if comm.rank == source else ours.new_zeros(1)
    return comm.all_gather(own.to(comm.device), sizes).wait()[source]
