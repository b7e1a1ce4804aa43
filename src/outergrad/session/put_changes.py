"""Changes of the weights on the board, for an exchange in which not all sites take part."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sent import Sent, Way
from outergrad.core.transport import Comm
from outergrad.messages.raw import content
from outergrad.session.gathering import Gathering, Roll

_POLL_S = 0.05
_DIGEST_BYTES = hashlib.sha256().digest_size


class PutChanges:
    """Changes that sites put on the board whole, and their mean.

    Collectives wait for all sites, so they cannot be used. A site puts its change there, and each
    one adds up those of all that take part, in the order of ranks: all get the same bits. Who was
    late reads them when it arrives.

    Args:
        comm: the transport.
        gathering: names the slots.
        like: tensors of the shapes, dtypes and device of a change, by name.
        look: called while this site waits; raises if the others gave up.
    """

    def __init__(
        self,
        comm: Comm,
        gathering: Gathering,
        like: Mapping[str, Tensor],
        look: Callable[[], None],
    ) -> None:
        self._comm, self._gathering, self._like, self._look = comm, gathering, like, look
        self._own: list[int] = []
        """Exchanges for which this site's change is still on the board."""

    def put(self, number: int, change: Mapping[str, Tensor]) -> None:
        """Puts this site's change there, once: others may have read it already."""
        if number in self._own:
            return
        whole = b"".join(content(change[name]) for name in self._like)
        self._comm.count(sent=len(whole))
        self._own.append(number)
        if self._comm.tap is not None:
            for name in self._like:
                about = {"way": Way.GATHERED, "step": number}
                self._comm.tap.sent(Sent(name=name, content=change[name], **about))
        digest = hashlib.sha256(whole).digest()
        self._gathering.board.put(self._slot(number, self._comm.rank), digest + whole)

    def mean(self, number: int, roll: Roll) -> dict[str, Tensor]:
        """Returns the mean of the changes of an exchange; waits until they are there.

        Raises:
            ExchangeError: a change does not come, or is damaged.
        """
        sums = {name: torch.zeros_like(t, dtype=_wide(t)) for name, t in self._like.items()}
        for rank, one in sorted(roll.there.items()):
            for name, change in self._of(number, rank).items() if one.shares else ():
                sums[name].add_(change, alpha=one.weight)
        return {name: (t / roll.weight).to(self._like[name].dtype) for name, t in sums.items()}

    def drop_before(self, number: int) -> None:
        """Drops this site's changes of earlier exchanges, which all sites have applied."""
        for earlier in [one for one in self._own if one < number]:
            self._gathering.board.drop(self._slot(earlier, self._comm.rank))
            self._own.remove(earlier)

    def _slot(self, number: int, rank: int) -> str:
        return self._gathering.slot(f"change {rank}", number)

    def _of(self, number: int, rank: int) -> dict[str, Tensor]:
        came = self._read(number, rank)
        digest, whole = came[:_DIGEST_BYTES], came[_DIGEST_BYTES:]
        if rank != self._comm.rank:
            self._comm.count(received=len(whole))
        nbytes = sum(t.nbytes for t in self._like.values())
        if hashlib.sha256(whole).digest() != digest or len(whole) != nbytes:
            who = self._comm.sites[rank].called
            raise ExchangeError(f"the change that {who} put on the board is damaged", (rank,))
        return self._parsed(whole)

    def _read(self, number: int, rank: int) -> bytes:
        began = time.monotonic()
        while (came := self._gathering.board.get(self._slot(number, rank))) is None:
            self._look()
            if (waited_s := time.monotonic() - began) > self._comm.patience_s:
                who = self._comm.sites[rank].called
                told = f"{who} has not put its change on the board within {waited_s:.0f} s"
                raise ExchangeError(told, (rank,), kind=Failure.TIMEOUT)
            time.sleep(_POLL_S)
        return came

    def _parsed(self, whole: bytes) -> dict[str, Tensor]:
        found, at = dict[str, Tensor](), 0
        room = bytearray(whole)  # of its own, as PyTorch warns of memory that is read-only
        for name, t in self._like.items():
            part = torch.frombuffer(room, dtype=torch.uint8, count=t.nbytes, offset=at)
            found[name] = part.clone().view(t.dtype).view(t.shape).to(t.device, _wide(t))
            at += t.nbytes
        return found


def _wide(t: Tensor) -> torch.dtype:
    """Returns the dtype in which changes are added up: of 64 bits."""
    return torch.promote_types(t.dtype, torch.float64)
