"""A process group of torch.distributed whose collectives go through a hub."""

# PyTorch calls these methods by position, and its stubs list overloads that only C++ has.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch._compile import _disable_dynamo
from torch.distributed import ReduceOp

from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Comm
from outergrad.messages.raw import content
from outergrad.star.backend.post import LARGE_BYTES, OpenPost, Post, code_of
from outergrad.star.backend.profiling import recorded
from outergrad.star.backend.store import IN_SESSIONS, HubStore
from outergrad.star.backend.works import Finisher, FirstOf, LineWork, Rooms, Waiting
from outergrad.star.frames import ALL, Kind, Place
from outergrad.star.transport import Held

if TYPE_CHECKING:
    from outergrad.star.lines import StarLines
    from outergrad.star.sealing import Seal

T = TypeVar("T")
NAME = "outergrad"
_OPERATIONS = {
    "SUM": "sum",
    "AVG": "mean",
    "MIN": "min",
    "MAX": "max",
    "PRODUCT": "product",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
_EVENTS = {
    "allreduce": "all_reduce",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
"""Events of the methods by which all others go."""
_OF_BOOL = {"sum": "max", "product": "min"}
"""Operations of True and False in place of those of the numbers 1 and 0."""
_OF_COMPLEX = frozenset({"sum", "mean"})
_KEPT_WORKS, _FEW_NUMBERS = 1 << 10, 1 << 7
_FLUSH_S = 5.0
"""Longest time, seconds, in which nothing moves while a group that ends sends its last messages."""


def _collectives(made: type[T]) -> type[T]:
    """Shows the collectives of a group in profiles, and keeps torch.compile out of its methods."""
    for name, call in vars(made).items():
        if callable(call) and not name.startswith("__"):
            event = _EVENTS.get(call.__name__)
            shown: Callable[..., Any] = recorded(f"{NAME}:{event}", call) if event else call
            setattr(made, name, _disable_dynamo(shown))
    return made


@_collectives
class StarGroup(dist.ProcessGroup):
    """Collectives among sites around a hub.

    Sums, minima and the like are made by the hub, of floats in 64 bits and rank order, so a site
    sends a tensor once and receives it once. All else is relayed. With `og.Star(blind=True)` a hub
    adds up masked numbers, and relays what sites encrypt for each other (`sealed_post.py`).

    Args:
        held: this process's hold of its line, and the transport of its sessions.
        name: of the group, the same on all its sites and of no other one of the run.
        ranks: of the sites in the run, in the order of ranks in the group.
        timeout: longest time in which nothing moves, of collectives.
        store: at the hub, which the group keeps alive.
        own_store: part of it that belongs to this group; None for all of it.

    Attributes:
        transport: of sessions over this group, which share the line; None if it is not of all sites
            in the order of the run.
        way: how messages travel, in words.

    Raises:
        ExchangeError: the hub does not answer, or other sites have opened another group.
    """

    supports_splitting, supports_coalescing, supports_time_estimate = True, False, False
    options: Any = None
    """PyTorch copies the options of a group that it splits."""

    def __init__(
        self,
        held: Held,
        name: str,
        ranks: Sequence[int],
        timeout: timedelta,
        store: HubStore,
        own_store: Store | None = None,
    ) -> None:
        line = held.line
        super().__init__(ranks.index(line.rank), len(ranks))  # pyright: ignore[reportCallIssue]
        self._held, self._line, self._ranks = held, line, tuple(ranks)
        self._name, self._opened, self._described = name, name, "undefined"
        self.way = held.way
        self._kept, self._store = store, own_store or store
        self.transport = held.star if self._ranks == tuple(range(len(line.names))) else None
        self._patience_s = timeout.total_seconds()
        self._finisher = Finisher(line)
        # A site that comes to others that train finds no group.
        self._joined = self._join(held.seal) if line.is_ready else None
        self._sent, self._received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._coalesced: list[LineWork] | None = None
        self._alive = deque[LineWork](maxlen=_KEPT_WORKS)
        """The last works of few numbers: where C++ alone holds one, PyTorch would lose its Python
        half, and wait for ever. DDP does so with the number of sites that have inputs left."""
        self._sequence = 0

    def _join(self, seal: Seal | None) -> Post:
        """Opens the group at the hub; returns the way of its messages."""
        line, ranks, name = self._line, sorted(self._ranks), self._opened
        lane = line.open_group(name, ranks, self._patience_s)
        if seal is None:
            return OpenPost(line, lane)
        from outergrad.star.backend.sealed_post import SealedPost

        lanes = lane, line.open_group(f"{name} again", ranks, self._patience_s)
        return SealedPost(line, lanes, ranks, seal, lambda: self._patience_s)

    @property
    def _post(self) -> Post:
        """Way of the messages of the group."""
        self._refuse_ended()
        assert self._joined is not None
        return self._joined

    def _refuse_ended(self) -> None:
        """Raises if its sites train in sessions alone, since some were lost or came back."""
        if self._joined is None or self._line.has_left:
            raise ExchangeError(IN_SESSIONS, kind=Failure.LOCAL)

    # -- what PyTorch asks a group --------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's C++ code calls it so
        """Returns the name of the backend."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Returns the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Sets the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns the description of the group."""
        return self._described

    def setGroupDesc(self, described: str) -> None:  # noqa: N802
        """Sets the description of the group."""
        self._described = described

    def get_group_store(self) -> Store:
        """Returns the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the longest time in which nothing moves."""
        self._patience_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _: torch.device) -> StarGroup:
        return self

    def _get_backend_name(self) -> str:
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _: torch.device) -> LineWork:
        works, self._coalesced = self._coalesced or [], None
        return self._work([one for work in works for one in work.awaited], [])

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> StarGroup | None:
        """Returns a group of some sites of this one; None on the others, which need not call it."""
        sites = [self._ranks[rank] for rank in ranks]
        if self._line.rank not in sites:
            return None
        name = group_name or "split " + " ".join(map(str, ranks))
        limit = timeout or timedelta(seconds=self._patience_s)
        own = PrefixStore(name, self._store)
        split = StarGroup(self._held, f"{self._opened}/{name}", sites, limit, self._kept, own)
        split.setGroupName(name)
        split.setGroupDesc(group_desc or "undefined")
        return split

    def perform_nocolor_split(self, _: torch.device) -> None:
        """Does nothing: sites that are not in a new group have no part in making it."""

    def eager_connect_single_device(self, _: torch.device) -> None:
        """Does nothing: the line is there."""

    def shutdown(self) -> None:
        """Ends the threads of the group, once the hub has all that this site sent."""
        if self._joined is not None:
            self._joined.end()
        self._line.flush(min(self._patience_s, _FLUSH_S))
        self._finisher.end()

    abort = shutdown

    # -- sums and other reductions, which the hub makes -------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = ReduceOp.SUM) -> LineWork:
        """Replaces tensors by their sums over the sites, or what another operation makes."""
        if tensors and tensors[0].is_sparse:
            return self._sparse_sum(tensors[0], _operation(opts))
        operation = _operation(opts)
        awaited = [one for t in tensors for one in self._reduced(t, t, operation)]
        return self._work(awaited, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> LineWork:
        """Writes the sum of tensors on one site, `rootRank`, or what another operation makes."""
        about = _operation(opts), opts.rootRank
        awaited = [one for t in tensors for one in self._reduced(t, t, *about)]
        return self._work(awaited, tensors, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> LineWork:
        """Sums the r-th tensors of all sites on the r-th site."""
        operation = _operation(opts or ReduceOp.SUM)
        awaited: list[Waiting] = []
        for into, parts in zip(outputs, inputs, strict=True):
            for root, part in enumerate(parts):
                awaited += self._reduced(part, into, operation, root)
        return self._work(awaited, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        """Sums the r-th parts of several tensors on the r-th site."""
        return self.reduce_scatter(outputs, [self._parts(whole) for whole in wholes], opts)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> LineWork:
        """Sums the r-th parts of the tensors of all sites on the r-th site."""
        return self.reduce_scatter([output], [self._parts(whole)], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> LineWork:
        """Waits for all sites."""
        return self._work(self._post.barrier() if self.size() > 1 else [], [torch.zeros(1)], opts)

    def _reduced(
        self, t: Tensor, into: Tensor, operation: str, root: int | None = None
    ) -> Sequence[Waiting]:
        """Sends a tensor to be summed; writes the sum into another, of one site or on all."""
        numbers, operation = _numbers_of(t, operation)
        code_of(numbers, operation)  # which raises where there is none
        if self.size() == 1:
            _copy(t, into)
        if self.size() == 1 or not t.numel():
            return []
        written = (lambda room: _write(room, into)) if root in (None, self.rank()) else None
        to = ALL if root is None else self._ranks[root]
        return self._post.reduce(numbers, operation, to, written)

    def _sparse_sum(self, t: Tensor, operation: str) -> LineWork:
        """Sums sparse tensors, whose entries all sites exchange: their numbers differ."""
        if operation != "sum":
            raise ValueError(f"sparse tensors can be summed alone, not by {operation!r}")
        own = t.coalesce()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        self.allgather([counts], [torch.tensor([own._nnz()])]).wait()
        indices = [own.indices().new_empty((own.sparse_dim(), int(n))) for n in counts]
        values = [own.values().new_empty((int(n), *own.shape[own.sparse_dim() :])) for n in counts]
        self.allgather([indices], [own.indices()]).wait()
        self.allgather([values], [own.values()]).wait()
        parts = torch.cat(indices, 1), torch.cat(values)
        total = torch.sparse_coo_tensor(*parts, t.shape, check_invariants=True)
        with torch.no_grad():
            t.copy_(total.coalesce())
        return self._work([], [t])

    # -- tensors that the hub relays ------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> LineWork:
        """Overwrites tensors with those of one site."""
        root = 0 if opts is None else opts.rootRank
        awaited = [one for t in tensors for one in self._from_root(t, root)]
        return self._work(awaited, tensors, opts)

    def _from_root(self, t: Tensor, root: int) -> list[Waiting]:
        return self._gathered(self._only(root, t), t if self.rank() == root else t.new_empty(0))

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        """Gathers tensors of all sites on all sites."""
        pairs = zip(outputs, inputs, strict=True)
        awaited = [one for into, t in pairs for one in self._gathered(into, t)]
        return self._work(awaited, [t for into in outputs for t in into], opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        """Gathers lists of tensors: `outputs` has a list for each site."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        """Gathers several tensors of all sites, each one behind the other in its output."""
        awaited = []
        for output, t in zip(outputs, inputs, strict=True):
            awaited += self._gathered(self._parts(output), t)
        return self._work(awaited, outputs, opts)

    def all_gather_single(self, output: Tensor, t: Tensor, opts: Any = None) -> LineWork:
        """Gathers tensors of all sites, one behind the other in the output."""
        return self.all_gather_single_coalesced([output], [t], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gathered(self, outputs: Sequence[Tensor], own: Tensor) -> list[Waiting]:
        """Sends a tensor to all; writes those of other sites, and it, into the outputs."""
        self._meet(sum(t.nbytes for t in outputs))
        _copy(own, outputs[self.rank()])
        if self.size() == 1:
            return []
        place = self._line.place(Kind.GATHER, self._post.lane)
        awaited = self._expected(place, outputs)
        if own.numel():
            self._post.send(place, content(own))
        return awaited

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> LineWork:
        """Gathers tensors of all sites on one site, `rootRank`."""
        root, awaited = opts.rootRank, []
        for k, t in enumerate(inputs):
            self._meet(t.nbytes * self.size())
            into = outputs[k] if outputs else [t.new_empty(0)] * self.size()
            awaited += self._exchanged(into, self._only(root, t))
        return self._work(awaited, [t for into in outputs for t in into], opts)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> LineWork:
        """Sends each site a tensor of one site, `rootRank`."""
        root, awaited = opts.rootRank, []
        for k, t in enumerate(outputs):
            self._meet(t.nbytes * self.size())
            parts = inputs[k] if inputs else [t.new_empty(0)] * self.size()
            awaited += self._exchanged(self._only(root, t), parts)
        return self._work(awaited, outputs, opts)

    def _only(self, root: int, t: Tensor) -> list[Tensor]:
        """Returns a tensor for one site, and empty ones for the others."""
        return [t if rank == root else t.new_empty(0) for rank in range(self.size())]

    def _meet(self, nbytes: int) -> None:
        """Waits for all sites before a message so large that they could not keep it."""
        if nbytes > LARGE_BYTES and self.size() > 1:
            self.barrier().wait()

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        """Sends each site a tensor of its own."""
        return self._work(self._exchanged(outputs, inputs), outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> LineWork:
        """Sends each site a part of a tensor; sizes are of rows, equal ones if none are given."""
        into = self._parts(output, output_sizes)
        parts = self._parts(whole, input_sizes)
        return self._work(self._exchanged(into, parts), [output], opts)

    alltoall_base = all_to_all_single

    def _exchanged(self, outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Waiting]:
        """Sends each site its part; writes what it sends into the output of its rank."""
        if len(outputs) != self.size() or len(parts) != self.size():
            raise ValueError(f"{len(outputs)} and {len(parts)} tensors for {self.size()} sites")
        _copy(parts[self.rank()], outputs[self.rank()])
        if self.size() == 1:
            return []
        place = self._line.place(Kind.EACH, self._post.lane)
        awaited = self._expected(place, outputs)
        for rank, part in enumerate(parts):
            if rank != self.rank() and part.numel():
                self._post.send(place, content(part), self._ranks[rank])
        return awaited

    def _expected(self, place: Place, outputs: Sequence[Tensor]) -> list[Waiting]:
        """Expects a message of each other site whose output is not empty."""
        wanted = {
            self._ranks[rank]: into
            for rank, into in enumerate(outputs)
            if rank != self.rank() and into.numel()
        }
        if not wanted:
            return []

        def write(rooms: Rooms) -> None:
            for site, into in wanted.items():
                _write(rooms[site], into)

        sizes = {site: into.nbytes for site, into in wanted.items()}
        return [self._post.expect(place, sizes, write, -1)]

    # -- from one site to another ---------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> LineWork:
        """Sends a tensor to one site."""
        (t,) = tensors
        place = self._between(self.rank(), rank, tag, self._sent)
        if t.numel():
            self._post.send(place, content(t), self._ranks[rank])
        return self._work([], tensors)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> LineWork:
        """Receives a tensor of one site."""
        return self._receive(tensors, rank, tag)

    def _receive(self, tensors: Sequence[Tensor], rank: int, tag: int) -> LineWork:
        (t,) = tensors
        place, site = self._between(rank, self.rank(), tag, self._received), self._ranks[rank]
        if not t.numel():
            return self._work([], tensors)
        write = lambda rooms: _write(rooms[site], t)  # noqa: E731
        return self._work([self._post.expect(place, {site: t.nbytes}, write, rank)], tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> LineWork:
        """Receives a tensor of whichever site sends one first."""
        others = [rank for rank in range(self.size()) if rank != self.rank()]
        numbers, lane = {r: (r, self.rank(), tag) for r in others}, self._post.lane

        def has_come() -> int | None:
            for rank, key in numbers.items():
                number = _number(*key, self._received[rank, tag] + 1)
                if self._line.has_come(lane, number, self._ranks[rank]):
                    return rank
            if {self._ranks[rank] for rank in others} <= self._line.gone.keys():
                raise ExchangeError("all other sites are gone", kind=Failure.CLOSED)
            return None

        receive = lambda rank: self._receive(tensors, rank, tag)  # noqa: E731
        return self._work([FirstOf(has_come, receive)], tensors)

    def exchange_with(
        self, comm: Comm, sites: Sequence[int], number: int, most_bytes: int
    ) -> StarLines:
        """Opens lines between pairs of its sites, for a session of outergrad.

        Args:
            comm: transport of the session.
            sites: ranks of the neighbours in the group.
            number: of the session.
            most_bytes: largest content of a letter.

        Raises:
            ExchangeError: the hub does not answer, or sites train in sessions over the star alone.
        """
        from outergrad.star.lines import StarLines

        self._refuse_ended()
        ranks = {site: self._ranks[site] for site in sites}
        about = self._opened, number, most_bytes, self._held.seal
        return StarLines(comm, self._line, ranks, *about)

    def _between(
        self, source: int, target: int, tag: int, counts: Counter[tuple[int, int]]
    ) -> Place:
        """Returns the place of the next message between two sites, which only these count."""
        other = target if source == self.rank() else source
        counts[other, tag] += 1
        return Place(Kind.EACH, self._post.lane, _number(source, target, tag, counts[other, tag]))

    # -- parts and works ------------------------------------------------------------------------

    def _parts(self, whole: Tensor, sizes: Sequence[int] = ()) -> list[Tensor]:
        """Returns a tensor's parts for all sites, of so many rows, or equal ones."""
        if sizes:
            return list(whole.split(list(sizes)))
        if whole.shape[:1].numel() % self.size():
            raise ValueError(f"{len(whole)} rows cannot be divided among {self.size()} sites")
        return list(whole.chunk(self.size())) if whole.numel() else [whole] * self.size()

    def _work(
        self, awaited: Sequence[Waiting], results: Sequence[Tensor], opts: Any = None
    ) -> LineWork:
        own_s = getattr(opts, "timeout", timedelta(0)).total_seconds()
        patience_s = own_s if own_s > 0 else self._patience_s
        work = LineWork(self._line, awaited, results, patience_s, self._finisher)
        self._sequence += 1
        if sum(t.numel() for t in results) <= _FEW_NUMBERS:
            self._alive.append(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def _number(source: int, target: int, tag: int, count: int) -> int:
    """Returns the number of a message between two sites, apart from those of collectives."""
    told = f"{source} {target} {tag} {count}".encode()
    digest = hashlib.blake2b(told, digest_size=8).digest()
    return int.from_bytes(digest, "big") | 1 << 63


def _operation(opts: Any) -> str:
    """Returns the name of the operation in the options of a collective, or of a ReduceOp."""
    wanted = getattr(opts, "reduceOp", opts)
    for name, operation in _OPERATIONS.items():
        if wanted == getattr(ReduceOp, name):
            return operation
    raise ValueError(f"{wanted}: a hub makes {', '.join(_OPERATIONS)}")


def _numbers_of(t: Tensor, operation: str) -> tuple[Tensor, str]:
    """Returns a tensor as real numbers, and the operation on them in place of that on its own."""
    if t.is_complex():
        if operation not in _OF_COMPLEX:
            raise ValueError(f"complex numbers can be summed and averaged, not by {operation!r}")
        return torch.view_as_real(t.detach().resolve_conj()), operation
    if t.dtype == torch.bool:
        return t.detach().to(torch.uint8), _OF_BOOL.get(operation, operation)
    return t.detach(), operation


def _write(room: np.ndarray, into: Tensor) -> None:
    """Writes the bytes of a message into a tensor."""
    with torch.no_grad():
        came = torch.from_numpy(room).view(into.dtype).view(into.shape)
        into.copy_(came.pin_memory() if into.is_cuda else came)


def _copy(t: Tensor, into: Tensor) -> None:
    if t is not into:
        with torch.no_grad():
            into.copy_(t.view(into.shape) if t.numel() else t)
