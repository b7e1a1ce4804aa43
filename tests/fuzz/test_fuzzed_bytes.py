"""Whatever bytes a site sends, the others read a value that can be, or refuse it by its name.

Most messages get a valid checksum after they were changed: so does who means it. Nothing else is
raised, and memory and time stay in proportion to what was sent.
"""

from __future__ import annotations

import copy
import io
import json
import random
import re
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import damage
import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import mlp
from covering import LONG
from outergrad.buckets.bucket import StepContext
from outergrad.checkpoint.messaging import refuse_compressed
from outergrad.comm import link
from outergrad.comm.agree import agree
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.reasons import AutoWay, Reason, Why
from outergrad.core.sites import Site, sites_of
from outergrad.core.types import Link, Part, Route
from outergrad.linalg.gradients import add_gradients
from outergrad.messages import header as headers
from outergrad.messages import wire
from outergrad.messages.header import BlockUse, Header, Join, SlotUse
from outergrad.messages.layout import Layout, gradients_of
from outergrad.messages.vote import NOTHING, Verdict, Vote
from outergrad.messages.wire import Piece, Preamble, State, read_all
from outergrad.replay import block_message as _block_message
from outergrad.session import made_equal as _made_equal
from outergrad.session.attach import attach
from outergrad.session.mesh.rank_reports import RankStatus, Report, reasons_text, told_reasons
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.buffers import SharedBuffers
from outergrad.step.joint import JointStep, Point
from outergrad.wire import BF16, Int8, TopK

MOST_BYTES = 192 << 20
"""Of memory that a whole target may add, whatever is announced to it."""
MOST_S = 2.0
"""For one message: thousands of times what it takes, as the machine may be busy."""
REFUSALS = (ExchangeError, RefusedError)
F32 = torch.float32


@dataclass
class Target:
    """Something that reads what site 1 sent.

    Attributes:
        seeds: messages as they should be, bytes.
        read: what site 0 makes of one; raises if what it returns cannot be.
        seal: puts in a valid checksum.
        rounds: how often; a quarter of it without OUTERGRAD_LONG=1.
        changes: what may become of a message; a transport delivers the agreed length.
        others: what else it may raise.
    """

    seeds: list[Tensor]
    read: Callable[[Tensor], Any]
    seal: Callable[[Tensor], None] = lambda t: None
    rounds: int = 10_000
    changes: Any = damage.ANY_LENGTH
    others: tuple[type[Exception], ...] = ()


def as_bytes(words: list[int]) -> Tensor:
    return torch.tensor(words, dtype=torch.int64).view(torch.uint8)


def as_words(t: Tensor) -> list[int]:
    return t[: len(t) // 8 * 8].view(torch.int64).tolist()


class Answers:
    """A transport of two sites on which site 1 sends what is given, as long as was agreed or not.

    Its sizes are the transport's affair: `TorchComm` refuses what cannot be allocated.
    """

    rank, world_size, device = 0, 2, torch.device("cpu")
    sites = sites_of(2, ())
    tap = None

    def __init__(self, *answers: Tensor) -> None:
        self._answers = list(answers)

    def all_gather(self, t: Tensor, sizes: Any, lane: int = 0) -> Answers:
        self._own = t
        return self

    def wait(self) -> list[Tensor]:
        return [self._own, self._answers.pop(0)]

    def control(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def all_began(self) -> None:
        """Nobody goes by the pace here."""


# -- what is exchanged around a step --------------------------------------------------------------

USES = tuple(SlotUse(n, n % 2 == 0, headers.DTYPES[n % 4]) for n in range(5))
BLOCK_USES = (BlockUse(4096, True), BlockUse(0, False))
HEADER = Header(
    *(77, 5, 1, (True, False) * 35, (*USES, *BLOCK_USES)),
    joint=(2, 99),
    weight=3,
    buffers=(True, False, True),
)


def header() -> Target:
    expected = Header(*(77, 5, 0, HEADER.used, HEADER.uses), buffers=HEADER.buffers)

    def read(t: Tensor) -> None:
        found = Header.parse(as_words(t), expected, Site(1))
        assert 0 <= found.weight < 1 << 53
        assert isinstance(found.join, Join)
        assert all(0 <= use.rows < 1 << 41 for use in found.uses)
        assert all(use.dtype in headers.DTYPES for use in found.uses[: len(USES)])
        assert {use.dtype for use in found.uses[len(USES) :]} == {torch.uint8}
        assert 0 <= found.joint[0] < 1 << 31
        assert len(found.used) == 70
        assert torch.tensor(found.words()).dtype == torch.int64

    return Target([as_bytes(HEADER.words())], read, seal_header, 13_000)


def seal_header(t: Tensor) -> None:
    words = t[: len(t) // 8 * 8].view(torch.int64)
    if len(words) > 8:
        told = words.tolist()
        words[8] = headers.sum_of_words([*told[headers.KNOWN : 8], 0, *told[9:]])


def vote() -> Target:
    expected = Vote(77, 5, 0)

    def read(t: Tensor) -> None:
        found = Vote.parse(as_words(t), expected, Site(1), subjects=6, sites=3)
        assert isinstance(found.verdict, Verdict)
        assert NOTHING <= found.param < 6
        assert NOTHING <= found.site < 3

    def seal(t: Tensor) -> None:
        words = t[: len(t) // 8 * 8].view(torch.int64)
        if len(words) > headers.KNOWN:
            words[-1] = headers.sum_of_words(words.tolist()[headers.KNOWN : -1])

    votes = [Vote(77, 5, 1, digest=88), Vote(77, 5, 1, Verdict.REFUSED, 2, 1)]
    return Target([as_bytes(one.words()) for one in votes], read, seal, 20_000)


def report() -> Target:
    expected = Header(*(77, 5, 0, HEADER.used, HEADER.uses), buffers=HEADER.buffers)

    def read(t: Tensor) -> None:
        found = Report.parse(as_words(t), expected, 1)
        assert isinstance(found.fate, RankStatus)
        assert len(found.has_autograd_grad) == len(HEADER.used)

    def seal(t: Tensor) -> None:
        seal_header(t[: 8 * HEADER.length])

    words = Report(HEADER, RankStatus.GOOD, (False,) * 70).words()
    return Target([as_bytes(words)], read, seal, 7_000)


def words_of_ranks() -> Target:
    def read(t: Tensor) -> None:
        found = told_reasons(t.numpy().tobytes(), 1, 3)
        assert [type(reason.why) for reason in found] == [Why] * 3

    others = ((Route.GATHER, 1.5),)
    auto = AutoWay(way=Route.TWO_WAY, seconds=0.25, others=others, link=Link(1e-3, 1e6))
    low_rank = Reason(why=Why.LOW_RANK, route=Route.TWO_WAY, tapped=True, auto=auto)
    told = (Reason(why=Why.FACTORS), low_rank, Reason(why=Why.BYTES, nbytes=77))
    seeds = [torch.frombuffer(bytearray(reasons_text(told)), dtype=torch.uint8)]
    return Target(seeds, read, rounds=12_000, changes=(damage.text, *damage.ANY_LENGTH))


def links() -> Target:
    def read(t: Tensor) -> None:
        found = link._slowest(Answers(t.view(torch.int64)), Link(1e-3, 1e6))
        assert found.delay_s >= 0
        assert found.bytes_per_s > 0

    return Target([as_bytes([10**6, 10**8])], read, rounds=10_000, changes=damage.SAME_LENGTH)


def descriptions() -> Target:
    lines = ["outergrad 1", "method: DAD()", "parameter w: (3, 4) torch.float32, trained"]
    text = torch.frombuffer(bytearray("\n".join(["x", *lines[1:]]).encode()), dtype=torch.uint8)

    def read(t: Tensor) -> None:
        text = t[16:]
        agree(Answers(t[:16].view(torch.int64), text), lines)

    def seal(t: Tensor) -> None:
        if len(t) >= 16:
            told = t[16:].numpy().tobytes().decode(errors="replace").split("\n")
            t[:8] = as_bytes([agree_print(told)])

    def guarded(t: Tensor) -> None:
        if len(t) >= 16:
            read(t)

    seeds = [torch.cat([as_bytes([0, len(text)]), text])]
    return Target(seeds, guarded, seal, 6_000, others=(ValueError,))


def agree_print(lines: list[str]) -> int:
    from outergrad.comm.agree import fingerprint

    return fingerprint(lines)


# -- messages of a step ---------------------------------------------------------------------------

SLOT = og.Slot("l", "l.weight", 6, 40, bias="l.bias")
MATRIX = og.Slot("l", "l.weight", 6, 40)
TABLE = og.Slot("e", "e.weight", 6, 9, lookup=True)
PARAMS = {
    "l.weight": nn.Parameter(torch.zeros(6, 40)),
    "l.bias": nn.Parameter(torch.zeros(6)),
    "e.weight": nn.Parameter(torch.zeros(9, 6)),
    "o.weight": nn.Parameter(torch.zeros(5, 13)),
    "r": nn.Parameter(torch.zeros(5)),
}
ENTRIES = {
    "a few": og.Sparse(density=0.05),
    "half, int8": og.Sparse(density=0.5, wire=Int8()),
    "blocks, bf16": og.Sparse(density=0.2, select="blocks", block=7, wire=BF16()),
    "all": og.Sparse(density=1.0),
}
CODECS: dict[str, Any] = {
    "plain": (),
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "top-k": (TopK(0.2),),
    "top-k int8": (TopK(0.2), Int8()),
}


def seal_message(t: Tensor) -> None:
    if len(t) >= wire._FIXED_BYTES:
        wire._seal(t)


def factors(codecs: Any) -> Target:
    pieces = [Piece(SLOT, 4, F32, F32, codecs), Piece(TABLE, 5, F32, None, codecs)]
    layout = Layout(Preamble.nbytes(3, 2), {"r": PARAMS["r"]}, pieces)
    expected = Preamble(77, 5, 2, 0, State.GOOD, (False,) * 3, (4, 5))

    def written(rank: int) -> Tensor:
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for piece, rows in zip(pieces, layout.views(message), strict=True):
            wide = 40 if piece.slot is SLOT else None
            a = torch.randn(1, 4, 40) if wide else torch.randperm(9)[:5]
            count = 4 if wide else 5
            rows.fill(og.Factors(torch.randn(1, count, 6), a, torch.randn(1, 6) if wide else None))
        Preamble(77, 5, 2, rank, State.GOOD, (True, False, True), (3, 5)).write(message)
        return message

    own = written(0)

    def read(t: Tensor) -> None:
        preambles, state = read_all([own, t], expected)
        assert isinstance(state, State)
        assert all(0 <= rows < 1 << 41 for p in preambles for rows in p.wanted_rows)
        assert preambles[1].said >= 0
        gradients: dict[str, Tensor] = {}
        parts_SK = gradients_of([layout, layout], [own, t], 0)
        for slot, parts in zip((SLOT, TABLE), zip(*parts_SK, strict=True), strict=True):
            add_gradients(gradients, slot, parts, PARAMS, 0.5)
        assert {n: g.shape for n, g in gradients.items()} == {
            n: PARAMS[n].shape for n in ("l.weight", "l.bias", "e.weight")
        }

    changes = (*damage.SAME_LENGTH, damage.truncate)
    return Target(
        [written(1)], truncated_only_at_the_start(read, layout), seal_message, 2_500, changes
    )


def entries(method: og.Sparse) -> Target:
    """Of two weights, of which one has a last block that is short."""
    compressor, slots = method.compressor(), (MATRIX, og.Slot("o", "o.weight", 5, 13))
    pieces = [
        Piece(slot, compressor.count(slot), F32, None, method.codecs, compressor.form)
        for slot in slots
    ]
    layout = Layout(Preamble.nbytes(3, 2), {"r": PARAMS["r"]}, pieces)
    expected = Preamble(77, 5, 2, 0, State.GOOD, (False,) * 3, (4, 5))

    def written(rank: int) -> Tensor:
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        parts = [
            Part(p.slot, torch.randn(1, p.slot.outputs, p.slot.inputs), p.rows) for p in pieces
        ]
        for payload, view in zip(compressor.compress(parts), layout.views(message), strict=True):
            view.fill(payload)
        Preamble(77, 5, 2, rank, State.GOOD, (True, False, True), (3, 5)).write(message)
        return message

    own = written(0)

    def read(t: Tensor) -> None:
        _, state = read_all([own, t], expected)
        assert isinstance(state, State)
        gradients: dict[str, Tensor] = {}
        for piece, parts in zip(
            pieces, zip(*gradients_of([layout] * 2, [own, t], 0), strict=True), strict=True
        ):
            places_K = parts[1].places_B
            assert len(parts[1].values_K) == len(places_K) * parts[1].block == piece.rows
            assert bool((places_K.diff() > 0).all())
            assert 0 <= places_K[0] <= places_K[-1] < piece.slot.numel
            add_gradients(gradients, piece.slot, parts, PARAMS, 0.5)
        assert {n: g.shape for n, g in gradients.items()} == {
            piece.slot.weight: PARAMS[piece.slot.weight].shape for piece in pieces
        }

    changes = (*damage.SAME_LENGTH, damage.truncate)
    return Target(
        [written(1)], truncated_only_at_the_start(read, layout), seal_message, 2_500, changes
    )


def truncated_only_at_the_start(read: Callable[[Tensor], None], layout: Layout) -> Any:
    """A transport delivers as many bytes as were agreed; fewer are for the preamble alone."""

    def whole(t: Tensor) -> None:
        if len(t) == layout.nbytes or len(t) < Preamble.nbytes(3, 2):
            read(t)

    return whole


def buffers(kind: str) -> Target:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    shared = SharedBuffers(model, kind)
    own = [Header(77, 5, rank, (), (), buffers=(True,) * 3) for rank in range(2)]
    sent: list[Tensor] = []

    class Sending(Answers):
        def all_gather(self, t: Tensor, sizes: Any, lane: int = 0) -> Answers:
            sent.append(t.clone())
            return super().all_gather(t, sizes, lane)

    def started(comm: Any, rank: int) -> Any:
        sender = StepContext(comm, {}, own[rank], {}, None, set(), None)
        sender.headers = own
        message = BufferMessage(shared, sender, sender.header.step)
        message.start()
        return message

    other = Sending()
    other.rank = 1
    started(other, 1)

    def read(t: Tensor) -> None:
        message = started(Sending(t), 0)
        if len(t) == len(sent[0]) or len(t) < 64:
            message.receive()
            message.finish(write=True)
        sent[1:] = []

    return Target([sent[0]], read, seal_message, 2_500)


def deltas() -> Target:
    expected = Header(77, 5, 0, (), ())
    message = torch.zeros(64 + 4 * 12, dtype=torch.uint8)
    message[64:].view(F32).copy_(torch.randn(12))
    Preamble(77, 5, wire.DELTAS, 1, State.GOOD, ()).write(message)

    def read(t: Tensor) -> None:
        point = Point(None, torch.Size([3, 4]), F32)
        step = JointStep([point], Answers(t), expected)
        if len(t) == len(message) or len(t) < 64:
            assert step.mean(point, torch.randn(3, 4)).shape == (3, 4)

    return Target([message], read, seal_message, 4_000)


def blocks(codecs: Any) -> Target:
    """Real uses of a real block, as another site sends them; they are computed again."""
    found: list[Any] = []
    taken = _block_message.block_gradients

    def keep(*args: Any) -> Any:
        found.append(args)
        return taken(*args)

    torch.manual_seed(0)
    model = nn.Sequential(mlp(6, 12, 8), nn.Linear(8, 3))
    method = og.EDAD(blocks=["0"], inputs="raw", always=True, wire=codecs)
    session = attach(model, method, MirrorComm(2, Tracer()), Link(1e-3, 1e9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outergrad.buckets.gather.block_gradients", keep)
        model(torch.randn(5, 6)).square().mean().backward()
    session.detach()
    tapped, (own, other, *_), *rest = found[0]
    shapes = {name: g.shape for name, g in taken(tapped, [own, other], *rest).items()}

    def read(t: Tensor) -> None:
        gradients = taken(tapped, [own, t], *rest)
        assert {name: g.shape for name, g in gradients.items()} == shapes

    return Target([other.clone()], read, seal_text, 2_000, (damage.text, *damage.ANY_LENGTH))


def seal_text(t: Tensor) -> None:
    """The length of the description is that of the JSON text at the start, if it still is one."""
    content = t[8:].numpy().tobytes()
    end = content.rfind(b"]]}") + 3
    if end > 3 and len(t) >= 8:
        t[:8] = as_bytes([end])


# -- replicas and files ---------------------------------------------------------------------------


def states() -> Target:
    told = {"states": {"dict": {"w": {"dict": {}}}}, "tensors": [[0, [3, 4]], [4, []]]}
    seed = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)

    def read(t: Tensor) -> None:
        _, shapes = _made_equal._read(t.numpy().tobytes(), Site(1))
        assert all(shape.is_meta for shape in shapes)

    return Target([seed], read, rounds=12_000, changes=(damage.text, *damage.ANY_LENGTH))


def files() -> Target:
    made = io.BytesIO()
    torch.save({"w": torch.randn(4, 3), "step": 7}, made)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 24))
    seeds = [made.getvalue(), packed.getvalue()]
    as_tensors = [torch.frombuffer(bytearray(seed), dtype=torch.uint8) for seed in seeds]

    def read(t: Tensor) -> None:
        refuse_compressed(t.numpy().tobytes())

    return Target(as_tensors, read, rounds=3_000, others=(ValueError,))


TARGETS: dict[str, Callable[[], Target]] = {
    "header": header,
    "vote": vote,
    "report of a rank": report,
    "words of a rank": words_of_ranks,
    "link": links,
    "description": descriptions,
    **{f"factors, {name}": lambda c=codecs: factors(c) for name, codecs in CODECS.items()},
    **{f"entries, {name}": lambda m=method: entries(m) for name, method in ENTRIES.items()},
    "buffers": lambda: buffers("mean"),
    "mean deltas": deltas,
    "blocks": lambda: blocks(()),
    "blocks, int8": lambda: blocks((Int8(),)),
    "optimizer states": states,
    "files": files,
}


def test_there_are_a_hundred_thousand_rounds():
    """With OUTERGRAD_LONG=1."""
    assert sum(make().rounds for make in TARGETS.values()) >= 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_a_site_sends_is_read_or_refused_by_its_name(name):
    torch.manual_seed(1)
    target = TARGETS[name]()
    for seed in target.seeds if name != "files" else ():
        valid = seed.clone()
        target.seal(valid)
        try:
            target.read(valid)
        except target.others:
            assert name == "description"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = set()
    for message in messages(target):
        outcomes.add(outcome(target, message))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MOST_BYTES
    assert outcomes == {"read", "refused"}


def messages(target: Target) -> Iterator[Tensor]:
    r, seeds = random.Random(7), [seed.numpy().tobytes() for seed in target.seeds]
    for k in range(target.rounds if LONG else target.rounds // 4):
        changed = damage.damaged(r, seeds[k % len(seeds)], target.changes)
        message = torch.frombuffer(changed, dtype=torch.uint8) if changed else torch.empty(0)
        if r.random() < 0.9:
            target.seal(message.view(torch.uint8))
        yield message.view(torch.uint8)


def outcome(target: Target, message: Tensor) -> str:
    given, began = copy.copy(message), time.monotonic()
    try:
        target.read(message)
        found = "read"
    except REFUSALS as error:
        told = getattr(error, "site", None) == 1  # all sites hear it from the vote
        named = told or re.search("(site|rank) 1 ", f"{error} ")
        found = "refused" if named else str(error)
    except target.others:
        found = "refused"
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} of {given.tolist()}") from error
    assert time.monotonic() - began < MOST_S
    return found
