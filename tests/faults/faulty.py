"""Transports on which something goes wrong, in place of the one that `distribute` uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outergrad.comm.torch import TorchComm
from outergrad.comm.work import tag_of
from outergrad.messages.vote import WORDS
from outergrad.step.transport_state import on_transport

Change = Callable[[int, int, list[Tensor]], None]
"""Is given a site, the number of a message that reached it, and its parts by sender; or a sum."""


class Died(BaseException):
    """What a site raises that is no more."""


class _Changed:
    def __init__(self, work: Any, change: Callable[[list[Tensor]], None]) -> None:
        self._work, self._change = work, change

    def advance(self) -> None:
        self._work.advance()

    def wait(self) -> Any:
        found = self._work.wait()
        # Copies: threads that are sites would see each other's changes otherwise.
        parts = [part.clone() for part in found] if isinstance(found, list) else [found]
        self._change(parts)
        return parts if isinstance(found, list) else found


class FaultyComm(TorchComm):
    """Changes what arrives while `armed`, and dies where it is told to.

    Set `change` before the sites begin. `kind` counts messages apart: "payload" (bytes and sums),
    "header" and "vote".
    """

    change: Change | None = None
    kind = "payload"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.armed, self.seen = False, 0
        self.dies_after_vote_to: tuple[int, ...] | None = None
        _MADE[threading.current_thread().name] = self

    def all_reduce(self, t: Tensor) -> Any:
        return self._counted("payload", super().all_reduce(t))

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Any:
        if lane == 2 and self.dies_after_vote_to is not None:
            self._die(t)
        kind = "payload" if t.dtype != WORD else "vote" if len(t) == WORDS else "header"
        return self._counted(kind, super().all_gather(t, sizes, lane))

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Any:
        return self._counted("payload", super().all_to_all(parts, sizes))

    def _counted(self, kind: str, work: Any) -> Any:
        if not self.armed or self.change is None or kind != self.kind:
            return work
        index, self.seen, change = self.seen, self.seen + 1, self.change
        return _Changed(work, lambda parts: change(self.rank, index, parts))

    def _die(self, vote: Tensor) -> None:
        """Its vote reaches some sites, then its connections close without a word."""
        for other in self.dies_after_vote_to or ():
            dist.isend(vote, group=self.group, group_dst=other, tag=tag_of(self._turn, 2)).wait()
        on_transport(self.key).end_watching()
        with suppress(RuntimeError):
            self.close()
        raise Died


WORD = torch.int64
_MADE: dict[str, FaultyComm] = {}


def own_comm() -> FaultyComm:
    """The one of this thread's session."""
    return _MADE[threading.current_thread().name]
