"""Buffers that are written to past their version are shared as all others."""

from __future__ import annotations

import copy
import ctypes
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_buffers import METHODS, batch, buffers_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outergrad as og
from outergrad.messages.wire import Preamble
from outergrad.step.buffers import Contents
from ranks import run_on_lasting_groups

WIDTH, LARGE = 16, 50_000


class Writer(nn.Module):
    """Keeps something of what it sees, in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(100_000.0))
        self.prepare()

    def prepare(self) -> None:
        """More buffers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(x.detach().mean(0))
        return x + self.table[:WIDTH] + self.shift()

    def shift(self) -> Tensor:
        """What the output depends on."""
        return self.seen

    def write(self, x: Tensor) -> None:
        """Keeps it."""
        raise NotImplementedError


class ByData(Writer):
    def write(self, x: Tensor) -> None:
        self.seen.data.mul_(0.5).add_(x)


class ByNumpy(Writer):
    def write(self, x: Tensor) -> None:
        self.seen.numpy()[:] += x.numpy()


class ByMemory(Writer):
    """As a kernel of one's own does."""

    def write(self, x: Tensor) -> None:
        ctypes.memmove(self.seen.data_ptr(), x.contiguous().data_ptr(), x.nbytes)


class ByDLPack(Writer):
    def write(self, x: Tensor) -> None:
        torch.from_dlpack(torch.utils.dlpack.to_dlpack(self.seen)).copy_(x)


class BySettingData(Writer):
    def write(self, x: Tensor) -> None:
        self.seen.data = x


class BySet(Writer):
    def write(self, x: Tensor) -> None:
        self.seen.set_(x.clone())


class BySwap(Writer):
    def write(self, x: Tensor) -> None:
        torch.utils.swap_tensors(self.seen, x.clone())


class ByAssignment(Writer):
    def write(self, x: Tensor) -> None:
        self.seen = x


class ByForeach(Writer):
    def write(self, x: Tensor) -> None:
        torch._foreach_add_([self.seen.data], [x])


class InInference(Writer):
    def prepare(self) -> None:
        with torch.inference_mode():
            self.seen = torch.zeros(WIDTH)

    def shift(self) -> Tensor:
        return self.seen.clone()

    def write(self, x: Tensor) -> None:
        with torch.inference_mode():
            self.seen.add_(x)


class Transposed(Writer):
    """A view of other strides, of which one element in a row is a buffer."""

    def prepare(self) -> None:
        self.seen = torch.zeros(WIDTH, 3).t()[1]

    def write(self, x: Tensor) -> None:
        self.seen.data.copy_(x)


class Statistics(Writer):
    """`F.batch_norm` writes through, and these names are not those of PyTorch's norms."""

    def prepare(self) -> None:
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = F.batch_norm(x, self.seen, self.spread, training=self.training)
        return y + self.shift()


class LargeData(Writer):
    """As the codebooks of VQ-VAEs are written."""

    def prepare(self) -> None:
        self.seen = torch.zeros(LARGE)

    def shift(self) -> Tensor:
        return self.seen[:WIDTH]

    def write(self, x: Tensor) -> None:
        self.seen.data.mul_(0.5).add_(x.sum())


class OtherBits(Writer):
    def prepare(self) -> None:
        self.seen = torch.zeros(WIDTH, dtype=torch.complex64)
        for name, dtype in (("a", torch.bool), ("b", torch.bfloat16), ("c", torch.int64)):
            self.register_buffer(name, torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("d", torch.full((WIDTH,), float("nan"), dtype=torch.float64))

    def shift(self) -> Tensor:
        return self.seen.real

    def write(self, x: Tensor) -> None:
        self.seen.data.copy_(x)
        self.a.data.copy_(x > 0.5)
        self.b.data.copy_(x)
        self.c.data.copy_(100 * x)
        self.d.data[::2] = x.double()[::2]


WRITERS = [
    *(ByData, ByNumpy, ByMemory, ByDLPack, BySettingData, BySet, BySwap, ByAssignment, ByForeach),
    *(InInference, Transposed, Statistics, LargeData, OtherBits),
]


def _built(kind: type[Writer]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), kind(), nn.Linear(WIDTH, 4))


def _step(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    model(batch(rank, step)).square().mean().backward()


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of buffers that differ, in any bit."""
    pairs = {
        name: (t.contiguous().view(-1), other[name].contiguous().view(-1))
        for name, t in one.items()
    }
    return [
        n
        for n, (a, b) in pairs.items()
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    ]


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
def test_every_way_of_writing(kind):
    """All sites have rank 0's after each step, as they would be by themselves."""
    original = _built(kind)

    def body(rank, group):
        model = copy.deepcopy(original)
        og.distribute(model, og.DAD(always=True), group=group)
        found = []
        for step in range(4):
            _step(model, rank, step)
            found.append(buffers_of(model))
        return found

    alone = copy.deepcopy(original)
    sites = run_on_lasting_groups(3, body)
    for step, (first, *others) in enumerate(zip(*sites, strict=True)):
        _step(alone, 0, step)
        assert _equal(first, buffers_of(alone)) == []
        assert all(_equal(other, first) == [] for other in others)
    assert _equal(sites[0][0], buffers_of(original))


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
def test_every_way_of_writing_now_and_then(kind):
    """Steps in between write nothing, and follow each other's plan."""
    original = _built(kind)
    writes = [step in (0, 5, 6, 11) for step in range(14)]

    def body(rank, group):
        model = copy.deepcopy(original)
        og.distribute(model, og.Dense(), group=group)
        found = []
        for step, does in enumerate(writes):
            if does:
                model(batch(rank, step))
            model.zero_grad()
            model[2](model[0](batch(rank, step))).square().mean().backward()
            found.append(buffers_of(model))
        return found

    alone = copy.deepcopy(original)
    sites = run_on_lasting_groups(2, body)
    for step, (first, other) in enumerate(zip(*sites, strict=True)):
        if writes[step]:
            alone(batch(0, step))
        assert _equal(first, buffers_of(alone)) == []
        assert _equal(other, first) == [], step


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["broadcast", "mean"])
def test_by_every_method(method, kind):
    original = _built(ByData)

    def body(rank, group):
        model = copy.deepcopy(original)
        og.distribute(model, METHODS[method], group=group, buffers=kind)
        for step in range(6):
            _step(model, rank, step)
        return buffers_of(model)

    first, *others = run_on_lasting_groups(3, body)
    assert all(_equal(other, first) == [] for other in others)


def test_with_local_steps():
    original = _built(ByData)

    def body(rank, group):
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = og.distribute(model, og.LocalSteps(2), group=group)
        for step in range(4):
            _step(model, rank, step)
            optimizer.step()
        session.detach()
        return buffers_of(model)

    first, second = run_on_lasting_groups(2, body)
    assert _equal(first, second) == []


def _prepared_for_quantization() -> nn.Module:
    """With PyTorch's default of quantization-aware training: fused observers, in C++."""
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, default_fused_act_fake_quant

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
            self.observed: FusedMovingAvgObsFakeQuantize = default_fused_act_fake_quant()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.observed(self.first(x)))

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fused_observers_of_quantization_aware_training(checkpointed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        original = _prepared_for_quantization()

    def body(rank, group):
        model = copy.deepcopy(original)
        og.distribute(model, og.DAD(always=True), group=group)
        scales = []
        for step in range(4):
            model.zero_grad()
            x = 10**rank * batch(rank, step)
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            y.square().mean().backward()
            scales.append(buffers_of(model))
        return scales

    first, second = run_on_lasting_groups(2, body)
    for one, other in zip(first, second, strict=True):
        assert _equal(one, other) == []
    assert first[-1]["observed.scale"].item() != 1.0


def test_what_a_backward_writes_is_shared_by_the_next_step():
    """Behind the header nobody can be told any more; it is not taken for what all have."""
    original = _built(ByData)

    def body(rank, group):
        model = copy.deepcopy(original)
        model.register_buffer("noted", torch.zeros(WIDTH))
        og.distribute(model, og.DAD(always=True), group=group)

        def hook(grad: Tensor) -> None:
            if model.noted[0] == 0:
                model.noted += rank + 1

        model[1].register_full_backward_hook(lambda module, *_: hook(_[1][0]))
        _step(model, rank, 0)
        after_first = model.noted.clone()
        _step(model, rank, 1)
        return after_first, model.noted.clone()

    sites = run_on_lasting_groups(2, body)
    assert [first[0].item() for first, _ in sites] == [1.0, 2.0]
    assert [second[0].item() for _, second in sites] == [1.0, 1.0]


def test_nothing_travels_that_nobody_writes():
    """Neither masks and tables nor statistics of norms that do not train."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))
        model.register_buffer("table", torch.arange(LARGE))
        model.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool).tril())
        model.register_buffer("nan", torch.full((9,), float("nan")))
        model[1].eval()
        return model

    original = built()

    def body(rank, group):
        sent = {}
        for kind in ("local", "broadcast"):
            model = copy.deepcopy(original)
            session = og.distribute(model, og.DAD(always=True), group=group, buffers=kind)
            for step in range(20):
                _step(model, rank, step)
            sent[kind] = session.stats().sent_bytes
            session.detach()
        return sent

    for sent in run_on_lasting_groups(2, body):
        assert sent["local"] == sent["broadcast"]


def test_what_is_written_travels_and_no_more():
    """The bytes of one buffer, at rank 0 alone; none in evaluation mode."""
    original = _built(ByData)

    def body(rank, group):
        sent = {}
        for kind in ("local", "broadcast"):
            model = copy.deepcopy(original)
            session = og.distribute(model, og.DAD(always=True), group=group, buffers=kind)
            found = []
            for step in range(8):
                model.train(step < 4)
                _step(model, rank, step)
                found.append(session.stats().sent_bytes)
            sent[kind] = found[3], found[7]
            session.detach()
        return sent

    for rank, sent in enumerate(run_on_lasting_groups(2, body)):
        usual = sent["local"][1]
        expected = Preamble.nbytes(1, 0) + (4 * WIDTH if rank == 0 else 0)
        assert sent == {"local": (usual, usual), "broadcast": (usual + expected, usual)}


class TestContents:
    """Of tensors by themselves."""

    def _of(self, *tensors: Tensor) -> Contents:
        contents = Contents([False] * len(tensors))
        contents.note(dict(enumerate(tensors)))
        return contents

    def test_a_small_part_of_a_large_buffer_is_found_when_its_turn_comes(self):
        large, small = torch.zeros(LARGE), torch.zeros(3)
        contents = self._of(small, large)
        turns = -(-large.nbytes // (1 << 16))
        for place in (1, 12_345, LARGE - 1):
            large.data[place] = 1.0
            found = [contents.changed([False, False]) for _ in range(turns)]
            assert [1] in found
            assert all(one in ([], [1]) for one in found)
            contents.note({1: large})
            assert all(contents.changed([False, False]) == [] for _ in range(2 * turns))

    def test_what_is_known_to_be_written_is_not_told_again(self):
        a, b = torch.zeros(3), torch.zeros(3)
        contents = self._of(a, b)
        a.data += 1
        assert contents.changed([False, False]) == [0]
        assert contents.changed([True, False]) == []
        b.data += 1
        assert contents.changed([True, False]) == [1]
        contents.note({1: b})
        assert contents.changed([False, False]) == [0]

    def test_memory_that_is_gone_is_not_read(self):
        t, other = torch.zeros(LARGE), torch.zeros(3)
        contents = self._of(t, other)
        t.untyped_storage().resize_(0)
        assert contents.changed([False, False]) == [0]
        other.data += 1
        assert contents.changed([True, False]) == [1]
        contents.note({0: t, 1: other})
        assert contents.changed([False, False]) == []

    @pytest.mark.parametrize(
        "t",
        [
            torch.eye(3).to_sparse(),
            torch.empty(3, device="meta"),
            torch.zeros(2, dtype=torch.complex64).conj(),
            nn.Parameter(torch.zeros(2)),
        ],
        ids=["sparse", "meta", "conjugate", "parameter"],
    )
    def test_what_is_no_plain_memory_is_left_alone(self, t: Any):
        contents = self._of(t, torch.zeros(1))
        assert contents.changed([False, False]) == []


def test_an_address_that_changed_is_told_until_the_values_are_noted():
    """A step asks more than once which buffers were written to."""
    buffers = {0: torch.zeros(3), 1: torch.zeros(3)}
    contents = Contents([False, False])
    contents.note(buffers)
    buffers[1].data = torch.ones(3)
    assert [contents.changed([False, False]) for _ in range(3)] == [[1], [1], [1]]
    contents.note({1: buffers[1]})
    assert contents.changed([False, False]) == []
