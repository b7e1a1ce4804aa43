"""Agreement before the first exchange: the sites compare what they are about to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from outergrad._printable import printable
from outergrad.comm.words import words_of_all
from outergrad.comm.work import LEAST_BYTES
from outergrad.core.errors import ExchangeError
from outergrad.core.transport import Comm
from outergrad.core.types import Link
from outergrad.messages.raw import as_tensor, digest, from_raw, in_chunks, overwrite, raw

_GROWTH = 4
_MOST_BYTES = 1 << 26
_SHARE = 0.125
"""Part of the timeout that a piece should take: the first ones may pass a slow link in a burst."""


class Course:
    """Broadcasts from rank 0 in pieces, which grow as fast as the link allows.

    Each piece is confirmed by all sites before the next is sent. Without confirmations rank 0 could
    not tell how far a broadcast has come: what it sends is at once in its own system's buffers,
    from where it may take minutes on a slow link. Every site learns the time of the slowest one, so
    that all cut the pieces alike.

    Args:
        comm: the transport.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._next_bytes = comm, LEAST_BYTES
        self._timeout_s = comm.patience_s
        self._pieces: list[tuple[float, int]] = []  # seconds and bytes of each

    def broadcast(self, flat: Tensor) -> None:
        """Overwrites a tensor of bytes with rank 0's."""
        done = 0
        while done < flat.nbytes:
            piece = flat[done : done + self._next_bytes]
            began = time.monotonic()
            self._comm.broadcast(piece)
            self._confirmed(piece.nbytes, time.monotonic() - began)
            done += piece.nbytes

    def _confirmed(self, nbytes: int, own_s: float) -> None:
        # The slowest site and the shortest timeout decide the size of the next piece.
        told = words_of_all(self._comm, [round(1e6 * own_s), round(1e3 * self._timeout_s)])
        took_s = max(max(own for own, _ in told), 1) / 1e6
        self._timeout_s = min(timeout for _, timeout in told) / 1e3
        self._pieces.append((took_s, nbytes))
        wanted = int(nbytes / took_s * self._timeout_s * _SHARE)
        self._next_bytes = min(_GROWTH * self._next_bytes, max(LEAST_BYTES, wanted), _MOST_BYTES)

    def settle(self) -> None:
        """Tells the transport the measured link, if the broadcasts were long enough."""
        all_bytes = sum(nbytes for _, nbytes in self._pieces)
        if all_bytes >= LEAST_BYTES:
            bytes_per_s = all_bytes / sum(took_s for took_s, _ in self._pieces)
            self._comm.settle_pace(Link(_delay_s(self._pieces), bytes_per_s), self._timeout_s)


def _delay_s(pieces: Sequence[tuple[float, int]]) -> float:
    """Returns the seconds that a piece of no bytes would take.

    They are extrapolated along a line (seconds over bytes) that begins at the fastest piece and
    lies below all larger ones: a busy machine makes a piece slower, never faster.
    """
    least_s, least_bytes = min(pieces)
    sizes = {nbytes for _, nbytes in pieces}
    if len(sizes) == 1:  # its bytes may have taken all of it
        return 0.0
    larger = [(s, nbytes) for s, nbytes in pieces if nbytes > least_bytes]
    s_per_byte = min(((s - least_s) / (nbytes - least_bytes) for s, nbytes in larger), default=0.0)
    return max(least_s - least_bytes * s_per_byte, 0.0)


_MOST_TEXT = 1 << 24
_SAME = "build the same model and method with the same versions everywhere"


def fingerprint(lines: Sequence[str]) -> int:
    """Returns 62 bits of the SHA-256 of a description."""
    return digest("\n".join(lines).encode())


def agree(
    comm: Comm,
    lines: Sequence[str],
    error: Exception | None = None,
    remedy: str = _SAME,
    who: str = "",
) -> int:
    """Compares a description over the sites, line by line.

    Args:
        comm: the transport.
        lines: this site's description, of the form "what: value".
        error: the exception that kept this site from describing itself, if any.
        remedy: advice to the user in the error of two sites that differ.
        who: name of a rank of the transport in errors, before its number; empty for sites.

    Returns:
        The common fingerprint.

    Raises:
        ValueError: two sites differ, the same message on every site, naming the first difference
            and the rank that has it; or another site could not describe itself.
        ExchangeError: a site sent an invalid description.
    """
    mine = [str(error) or type(error).__name__] if error else list(lines)
    print_, size = fingerprint(mine), len("\n".join(mine).encode())
    words = torch.tensor([print_, -size if error else size], dtype=torch.int64)
    theirs = [t.tolist() for t in comm.all_gather(words, [2] * comm.world_size).wait()]
    if error is None and all(t == theirs[0] for t in theirs):
        return print_
    named = [f"{who} {int(one)}" if who else one.called for one in comm.sites]
    texts = _exchange_texts(comm, mine, theirs, named)
    if error is not None:
        raise error
    raise ValueError(
        _first_refusal(texts, theirs, named) or _first_difference(texts, remedy, named)
    )


def _exchange_texts(
    comm: Comm, mine: Sequence[str], announced: Sequence[Sequence[int]], named: Sequence[str]
) -> list[list[str]]:
    """Gathers the descriptions, and checks each against its announced fingerprint and size.

    A negative size announces the error of a site that could not describe itself.
    """
    text = "\n".join(mine).encode()
    sizes = [abs(size) for _, size in announced]
    for rank, size in enumerate(sizes):
        if not 0 < size <= max(_MOST_TEXT, 4 * len(text)):
            raise ExchangeError(f"{named[rank]} announced a description of {size} bytes")
    parts = comm.all_gather(as_tensor(text), sizes).wait()
    told = zip(parts, announced, named, strict=True)
    return [_lines(part, print_, name) for part, (print_, _), name in told]


def _lines(part: Tensor, print_: int, whose: str) -> list[str]:
    lines = part.cpu().numpy().tobytes().decode(errors="replace").split("\n")
    if fingerprint(lines) != print_:
        raise ExchangeError(f"the description of {whose} is not as it was sent")
    return lines


def _first_refusal(
    texts: Sequence[Sequence[str]], announced: Sequence[Sequence[int]], named: Sequence[str]
) -> str | None:
    """Returns the error of the first site that could not describe itself, if any."""
    for name, text, (_, size) in zip(named, texts, announced, strict=True):
        if size < 0:
            return f"{name} could not take part: {printable(text[0])}"
    return None


def _first_difference(texts: Sequence[Sequence[str]], remedy: str, named: Sequence[str]) -> str:
    """Names the first line in which a site departs from the most common description."""
    usual = Counter(tuple(text) for text in texts).most_common(1)[0][0]
    normal = next(rank for rank, text in enumerate(texts) if tuple(text) == usual)
    odd = next(rank for rank, text in enumerate(texts) if tuple(text) != usual)
    for expected, found in zip_longest(usual, texts[odd], fillvalue="nothing"):
        if expected != found:
            return (
                f"the sites do not agree: {named[odd]} has {found!r} where {named[normal]} has "
                f"{expected!r}; {remedy}"
            )
    raise AssertionError("descriptions that differ in no line")


def all_came(comm: Comm, checksum: int, what: str = "", source: int = 0) -> None:
    """Compares a checksum of a broadcast over the sites, which waits for all of them.

    A broadcast alone may return before another site has begun to receive it.

    Args:
        comm: the transport.
        checksum: of the data that was broadcast, on this site.
        what: name of the data, for the error; empty for the source's model.
        source: rank that sent the broadcast.

    Raises:
        ExchangeError: the checksum of a site is not that of the source.
    """
    words = words_of_all(comm, [checksum])
    comm.all_began()
    odd = [rank for rank, theirs in enumerate(words) if theirs != words[source]]
    if odd:
        what = what or f"the model of {comm.sites[source].called}"
        raise ExchangeError(f"{what} did not reach {comm.sites[odd[0]].called} as it was sent")


@torch.no_grad()
def broadcast_all(comm: Comm, tensors: Sequence[Tensor]) -> None:
    """Overwrites tensors of any dtype with rank 0's, many in one message.

    The time that this takes gives the transport the rate of its link (`settle_pace`).
    """
    if comm.world_size == 1:
        return
    course = Course(comm)
    for chunk in in_chunks(tensors):
        _broadcast_chunk(comm, chunk, course)
    course.settle()


def _broadcast_chunk(comm: Comm, tensors: Sequence[Tensor], course: Course) -> None:
    flat = torch.cat([raw(t).to(comm.device) for t in tensors])
    course.broadcast(flat)
    if comm.rank == 0:
        return
    for tensor, part in zip(tensors, flat.split([t.nbytes for t in tensors]), strict=True):
        overwrite(tensor, from_raw(part, tensor.dtype, tensor.shape))
