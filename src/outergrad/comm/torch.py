"""The collectives of torch.distributed, with a count of their bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from outergrad.comm.backends import USUAL_HOST, ends_with, has_backend, is_gloo, name_of, store_of
from outergrad.comm.board import StoreBoard
from outergrad.comm.cost import ADDED_BYTES, RingCost
from outergrad.comm.failure_mailbox import FailureMailbox
from outergrad.comm.pieces import (
    PiecewiseSum,
    add_as_a_ring,
    first_rounds_of,
    piece_size,
    ring_pieces,
)
from outergrad.comm.relay import GatherInPieces, joined, piece_lengths, pieces_of
from outergrad.comm.work import (
    ADDED_LANE,
    AN_INSTANT,
    CLOSING_TAG,
    RELAY_LANE,
    SUMS_LANE,
    Pace,
    Ready,
    TorchWork,
    failed,
    if_open,
    room,
    sum_into,
    tag_of,
    transport,
)
from outergrad.core.cost import CostModel
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.sites import Site
from outergrad.core.transport import Comm, Enough, Lines
from outergrad.core.types import Link

_Receives = list[tuple[dist.Work, Sequence[int]]]
"""Transfers under way, each with the ranks that it depends on."""
_Receiving = tuple[list[Tensor], _Receives]
"""Tensors for the messages of all sites, and the transfers that fill them."""
SEND, RECEIVE = "send", "recv"
"""Methods of the group itself: the checks of torch.distributed take as long as the call."""
_PATIENCE = timedelta(seconds=30)
_BRIEFLY_S = 1.0
"""Seconds that a site which leaves in order may wait for the store."""


class TorchComm(Comm):
    """Collectives over a process group, for tensors of one device.

    With a gloo group, CUDA tensors go through host memory. Headers are on the host as well, so that
    reading them does not stop the device.

    Args:
        group: process group of the sites.
        device: of the tensors.
        timeout: of a wait in which nothing arrives; None for the group's own.
    """

    host, passes_on = USUAL_HOST, True

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None
    ) -> None:
        self.group = self.key = group
        self.rank, self.world_size = rank, sites = group.rank(), group.size()
        self._others = [(rank + k) % sites for k in range(1, sites)]
        self._only_other = self._others if sites == 2 else ()
        self.sent_bytes = self.received_bytes = 0
        self.cost: CostModel = RingCost(sites)
        self.device = device
        self._kept: Tensor | None = None
        self._as_sum = dist.AllreduceOptions()
        self._as_sum.asyncOp = True
        self._turn = 0
        self._model_bytes = 0
        """Bytes that were broadcast before the link was measured: what sites share of the model."""
        self._store: Store | None = None
        self._is_gloo = is_gloo(group)
        self._own_lines = getattr(group, "exchange_with", None)
        """Opens lines of a group that has a way of its own to one site alone, as around a hub."""
        self.has_lines = self._is_gloo or self._own_lines is not None
        self._posted: dict[int, deque[_Receiving]] = {}
        """Receives that no exchange has taken yet, by tag."""
        self._host = torch.device("cpu") if has_backend(group, "cpu") else device
        self._wire = device if has_backend(group, device.type) else self._host
        self._added_bytes: float = ADDED_BYTES if sites > 1 and self._wire.type == "cpu" else 0
        """Largest sum that sites add up themselves: `adds_up`, without a call per sum."""
        self._first_rounds = first_rounds_of(group)
        backend = name_of(group, self._wire.type) or "a backend that is not known"
        own: str | None = getattr(group, "way", None)  # of a group around a hub
        self.way = own or f"torch.distributed ({backend}), which encrypts nothing"
        # With NCCL, a wait with a timeout would block the host; it has a watchdog of its own.
        self.pace = Pace(timeout if self._wire.type == "cpu" else None)
        self.patience_s = (timeout or _PATIENCE).total_seconds()
        if self.world_size > 1 and self._wire.type == "cpu":
            self._store = store_of(group)
            if self._store is not None:
                self.board = StoreBoard(self._store)
                self.holds_board = ends_with(self.rank, self._store)

    def all_reduce(self, t: Tensor) -> Ready | TorchWork | PiecewiseSum:
        """Sums t over the sites in place, on its own device.

        Counts the bytes that a ring sends: 2 (S - 1) / S of the tensor. Sites add up a short tensor
        themselves, and a long one if the link has a large delay: as many bytes in fewer delays, and
        the same sum to the bit, so that a training repeats over another link.
        """
        if self.world_size == 1:
            return Ready(t)
        if 0 < t.nbytes <= self._added_bytes:
            return self._added_up(t) if self.world_size == 2 else self._added_in_pieces(t)
        self._book_sum(t)
        staged = self._staged(t)
        words = torch.view_as_real(staged) if staged.is_complex() else staged
        try:
            work = self.group.allreduce([words], self._as_sum)
        except RuntimeError as error:
            raise failed(error, self._only_other) from error
        result = lambda: t if staged is t else t.copy_(staged)  # noqa: E731
        return TorchWork([(work, self._only_other)], result, self.pace, self.pace.all_sent)

    def sum_rounds(self, nbytes: int) -> int:
        """Returns 2 for a sum that three or more sites add up in pieces."""
        return 2 if self.world_size > 2 and 0 < nbytes <= self._added_bytes else 1

    def _book_sum(self, t: Tensor) -> None:
        """Counts the bytes of a sum, of both rounds if there are two."""
        nbytes = self.cost.all_reduce(t.nbytes).sent
        self.sent_bytes += nbytes
        self.received_bytes += nbytes
        self.pace.sends(nbytes)

    def _added_up(self, t: Tensor) -> TorchWork:
        own = self._staged(t).view(-1)
        return self._exchanged([own, own], [len(own)] * 2, t.device, SUMS_LANE, sum_into(t))

    def _added_in_pieces(self, t: Tensor) -> PiecewiseSum:
        """Sends every site its piece of t, which it adds up and sends to all."""
        self._book_sum(t)
        staged, tag = self._staged(t), tag_of(self._turn, ADDED_LANE)
        words = torch.view_as_real(staged) if staged.is_complex() else staged
        pieces = ring_pieces(words, self.world_size)
        # A site sends its sum once it has this site's part of it: then its place in t is free.
        added = self._receives(pieces, tag)
        sizes = [len(pieces[self.rank])] * self.world_size
        first = tag_of(self._turn, SUMS_LANE)
        parts, receives, sends = self._transfers(pieces, sizes, first)

        def add_up() -> None:
            parts[self.rank] = pieces[self.rank]
            add_as_a_ring(parts, self.rank)

        def send_sum() -> TorchWork:
            result = lambda: t if staged is t else t.copy_(staged)  # noqa: E731
            sent = self._sends([pieces[self.rank]] * self.world_size, tag)
            return TorchWork(added, result, self.pace, self.pace.all_sent, sent)

        arriving = TorchWork(receives, add_up, self.pace, self.pace.all_sent, sends)
        return PiecewiseSum(arriving, send_sum, self._first_rounds)

    def all_gather(self, t: Tensor, sizes: Sequence[int], lane: int = 0) -> Ready | TorchWork:
        """Gathers every site's 1-D tensor on every site, directly from its owner.

        A ring would cost S - 1 delays; all pairs at once cost one.

        Args:
            t: this site's tensor.
            sizes: its length on each site, at least 1.
            lane: messages of one lane do not wait for those of another (on gloo).
        """
        if self.world_size == 1:
            return Ready([t])
        staged = self._staged(t)
        return self._exchanged([staged] * self.world_size, sizes, t.device, lane)

    def all_gather_in_pieces(
        self, t: Tensor, sizes: Sequence[int], lane: int = 0
    ) -> GatherInPieces:
        """Gathers tensors as `all_gather` does, but a site sends no more than all others together.

        Args:
            t: this site's tensor.
            sizes: its length on each site.
            lane: of the first round.
        """
        sites = self.world_size

        def in_order(passed_on: list[Tensor]) -> list[Tensor]:
            messages = joined(passed_on, sizes)
            messages[self.rank] = t
            return messages

        def pass_on(pieces: list[Tensor]) -> TorchWork:
            own = self._staged(torch.cat(pieces))
            alike = [len(own)] * sites
            return self._exchanged([own] * sites, alike, t.device, RELAY_LANE, in_order)

        pieces = pieces_of(self._staged(t), sites)
        first = self._exchanged(pieces, piece_lengths(sizes), t.device, lane)
        return GatherInPieces(first, pass_on)

    def take_turn(self, turn: int) -> None:
        """Gives messages from now on the tags of a turn: gloo cannot cancel a receive.

        Receives of turns that are over or left out are forgotten here. In gloo they stay posted,
        for a few hundred bytes of memory at both sites.
        """
        self._turn = turn
        if not turn:  # a step has ended, which no site began before it ended the previous one
            self.pace.confirmed()
        if turn and self._posted:
            tags = range(tag_of(turn, 0), tag_of(turn + 2, 0))
            self._posted = {tag: own for tag, own in self._posted.items() if tag in tags}

    def expect(
        self, sizes: Sequence[int], turn: int, dtype: torch.dtype = torch.uint8, lane: int = 0
    ) -> None:
        """Posts the receives of the next exchange of a turn and lane that has none posted yet.

        gloo sends nothing before it knows of the receive: if that is posted one delay before the
        other site sends, the message takes one delay, otherwise two. A receive has no deadline
        before its exchange waits for it.

        Args:
            sizes: length of the tensor that each site will send.
            turn: this one or the next.
            dtype: of the tensors.
            lane: as for `all_gather`.
        """
        if self.world_size > 1 and self._is_gloo and self._wire.type == "cpu":
            tag = tag_of(turn, lane)
            parts = [
                room(torch.empty(0, dtype=dtype), size, Site(r)) for r, size in enumerate(sizes)
            ]
            with if_open():  # the wait for the exchange raises if a site is gone
                self._posted.setdefault(tag, deque()).append((parts, self._receives(parts, tag)))

    def expect_in_pieces(self, sizes: Sequence[int], turn: int, lane: int = 0) -> None:
        """Posts the receives of both rounds of an `all_gather_in_pieces` of bytes."""
        lengths = piece_lengths(sizes)
        self.expect(lengths, turn, lane=lane)
        self.expect([sum(lengths)] * self.world_size, turn, lane=RELAY_LANE)

    def expect_sum(self, size: int, turn: int, dtype: torch.dtype) -> None:
        """Posts the receives of an `all_reduce` that sites add up themselves."""
        if not 0 < size * dtype.itemsize <= self._added_bytes:
            return
        if self.world_size > 2:
            if dtype.is_complex:
                size, dtype = 2 * size, dtype.to_real()
            size = piece_size(size, dtype, self.world_size, self.rank)
        self.expect([size] * self.world_size, turn, dtype, SUMS_LANE)

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> Ready | TorchWork:
        """Sends each site a 1-D tensor of its own, directly and in one delay, like `all_gather`.

        Args:
            parts: one tensor per site; this site's own stays here.
            sizes: length of each site's tensor for this one, at least 1.
        """
        if self.world_size == 1:
            return Ready([parts[0]])
        return self._exchanged([self._staged(t) for t in parts], sizes, parts[0].device)

    def settle_pace(self, link: Link, timeout_s: float) -> None:
        """Receives messages from now on in parts, each with a timeout of its own.

        Sites add up longer sums themselves where a ring would wait for the link.
        """
        self.pace.settle(link.bytes_per_s, timeout_s, len(self._others))
        self.cost = cost = RingCost(self.world_size).over(link, self._model_bytes)
        self._added_bytes = cost.added_bytes if self._added_bytes else 0

    def all_began(self) -> None:
        """Notes the end of an exchange that no site began before it had all earlier messages."""
        self.pace.confirmed()

    def _staged(self, t: Tensor) -> Tensor:
        """Returns t on a device from which the group can send it."""
        return t if t.device in (self._wire, self._host) else t.to(self._wire)

    def _exchanged(
        self,
        outgoing: Sequence[Tensor],
        sizes: Sequence[int],
        device: torch.device,
        lane: int = 0,
        then: Callable[[list[Tensor]], Any] = list,
    ) -> TorchWork:
        """Starts to exchange tensors with all other sites; the result is on the device."""
        sent_bytes = sum(t.nbytes for t in outgoing) - outgoing[self.rank].nbytes
        self.sent_bytes += sent_bytes
        self.pace.sends(sent_bytes)
        parts, receives, sends = self._transfers(outgoing, sizes, tag_of(self._turn, lane))
        self.received_bytes += sum(t.nbytes for t in parts) - parts[self.rank].nbytes

        def result() -> Any:
            # Holding `outgoing` here keeps its tensors alive until all have been sent.
            parts[self.rank] = outgoing[self.rank]
            return then([part.to(device) for part in parts])

        return TorchWork(receives, result, self.pace, self.pace.all_sent, sends)

    def _transfers(
        self, outgoing: Sequence[Tensor], sizes: Sequence[int], tag: int
    ) -> tuple[list[Tensor], _Receives, list[dist.Work]]:
        """Starts to exchange tensors, in receives that were posted before, if any were."""
        if self._posted.get(tag):
            parts, receives = self._posted[tag].popleft()
            if [len(part) for part in parts] != list(sizes):
                told = "what was expected is not what comes; please report it"
                raise ExchangeError(told, kind=Failure.LOCAL)
            return parts, receives, self._sends(outgoing, tag)
        parts = [room(outgoing[self.rank], size, Site(rank)) for rank, size in enumerate(sizes)]
        return parts, *self._exchange(outgoing, parts, tag)

    def _exchange(
        self, outgoing: Sequence[Tensor], parts: list[Tensor], tag: int
    ) -> tuple[_Receives, list[dist.Work]]:
        """Starts to send every other site its tensor and to receive the other parts."""
        if parts[0].device.type == "cuda":
            ops = [
                dist.P2POp(call, tensors[other], group=self.group, group_peer=other)
                for call, tensors in ((dist.irecv, parts), (dist.isend, outgoing))
                for other in self._others
            ]
            with transport(self._others):
                return [(work, self._others) for work in dist.batch_isend_irecv(ops)], []
        # gloo: a receive that is posted behind a send waits for it, and the link runs one way at
        # a time; so do gloo's own all_to_all and, less, its all_gather (docs/design.md).
        return self._receives(parts, tag), self._sends(outgoing, tag)

    def _receives(self, parts: Sequence[Tensor], tag: int) -> _Receives:
        wanted = [(o, part) for o in reversed(self._others) for part in self.pace.parts(parts[o])]
        return [(self._started(RECEIVE, part, o, tag), (o,)) for o, part in wanted]

    def _sends(self, outgoing: Sequence[Tensor], tag: int) -> list[dist.Work]:
        """Starts to send; skips a site that is gone, for whose own message the wait will raise."""
        works: list[dist.Work] = []
        for o in self._others:
            with if_open():
                parts = self.pace.parts(outgoing[o])
                works.extend(self._started(SEND, part, o, tag) for part in parts)
        return works

    def _started(self, call: str, t: Tensor, other: int, tag: int) -> dist.Work:
        try:
            return getattr(self.group, call)([t], other, tag)
        except RuntimeError as error:
            raise failed(error, (other,)) from error

    def give_up(
        self, text: str, final: str, enough: Enough, patience_s: float, session: int = 0
    ) -> list[str | None] | None:
        """Leaves a text for the other sites, closes the connections, and gathers their texts.

        The arguments are those of `FailureMailbox`. Returns None if there is no store, or no more.
        """
        words = self._mailbox(session)
        if words is None:
            self.close()
            return None
        words.leave(text)  # before closing: a site that finds itself cut off looks for the text
        self.close()
        return words.gather(enough, patience_s, final)

    def notes(self, session: int) -> FailureMailbox | None:
        """Returns the mailbox for farewells, which waits only briefly; None without a store."""
        return self._mailbox(session, _BRIEFLY_S)

    def _mailbox(self, session: int, limit_s: float | None = None) -> FailureMailbox | None:
        """Returns the mailbox of the group, or of its mesh; None if the sites share no store."""
        if self.mesh is not None and self.mesh.has_place:
            return self.mesh.words(session, limit_s)
        store = store_of(self.group) if self._store is None else self._store
        if store is None:
            return None
        return FailureMailbox(store, self.rank, self.world_size, session, limit_s)

    def close(self) -> None:
        """Closes all connections, so that the other sites notice the end at once.

        gloo has no call for that, but closes a connection when a receive on it times out.
        """
        if self._host.type != "cpu" or not self._is_gloo:
            with suppress(RuntimeError, AttributeError, NotImplementedError):
                self.group.abort()
            return
        for other in self._others:
            with suppress(ExchangeError), transport():
                work = self._started(RECEIVE, torch.empty(1), other, CLOSING_TAG)
                work.wait(AN_INSTANT)

    def exchange_with(self, sites: Sequence[int], number: int, most_bytes: int) -> Lines:
        """Opens lines to some other sites: over gloo's connections of pairs, or around a hub.

        Raises:
            RuntimeError: the group has no gloo backend, nor lines of its own.
        """
        if self._own_lines is not None:
            return self._own_lines(self, sites, number, most_bytes)
        if not self.has_lines:
            raise RuntimeError(
                "lines between pairs of sites need gloo: init_process_group('cpu:gloo,cuda:nccl')"
            )
        from outergrad.comm.lines import GlooLines  # few sessions need it

        return GlooLines(self, sites, number, most_bytes)

    def broadcast(self, t: Tensor) -> None:
        """Overwrites t with rank 0's."""
        if self.world_size == 1:
            return
        self._model_bytes += t.nbytes
        staged = t.to(self._wire).contiguous()
        with transport(self._only_other):
            work = dist.broadcast(staged, group=self.group, group_src=0, async_op=True)
        assert work is not None
        TorchWork([(work, self._only_other)], lambda: None, self.pace).wait()
        # A thread of gloo's may hold the tensor a little longer. If its reference were the last one
        # while the interpreter shuts down, the process would abort.
        self._kept = staged
        if staged is not t:
            t.copy_(staged)

    def control(self, values: Sequence[int]) -> Tensor:
        """Returns an int64 tensor, on the host if possible: reading it does not stop the device."""
        return torch.tensor(values, dtype=torch.int64, device=self._host)
