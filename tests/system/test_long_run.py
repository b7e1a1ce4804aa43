"""Thousands of small steps, with all that happens in a day, leave nothing behind.

A part of them by default; OUTERGRAD_LONG=1 runs 20,000.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
from cases import Boom
from outergrad.launch.simulate import gloo_group
from ranks import TIMEOUT

SITES = 2
STEPS = 5100 if os.environ.get("OUTERGRAD_LONG") else 450
"""Of each method."""
PERIOD = 150
"""After so many steps everything that is kept should be there. The last ones of each are plain, so
that what depends on the steps just before is the same whenever one looks."""

METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad, gathered": og.RankDAD(rank=1, reduce="gather", error_feedback="factored"),
    "sparse": og.Sparse(density=0.1, always=True, momentum=0.5, warmup=50),
    "edad beside a cadence": og.PerLayer(
        {"chain.*": og.EDAD(always=True, inputs="raw"), "*": og.DAD(always=True, every=3)}
    ),
}


class Net(nn.Module):
    """A table, a chain and a head, and a place where backward may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.chain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, *, raises: bool) -> torch.Tensor:
        x = Boom.apply(self.table(ids), raises)
        return (self.head(self.chain(x)) ** 2).sum() / 10


class Held(NamedTuple):
    """What the process holds.

    Attributes:
        tensors: that are alive.
        blocks: of Python's allocator.
        nbytes: of C's allocator.
        resident_bytes: of memory that the process occupies.
        threads: of Python and of others.
        files: open file descriptors.
    """

    tensors: int
    blocks: int
    nbytes: int
    resident_bytes: int
    threads: int
    files: int


def held() -> Held:
    for _ in range(3):
        gc.collect()
    return Held(
        tensors=sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        blocks=sys.getallocatedblocks(),
        nbytes=_allocated_bytes(),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
    )


class _Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def _allocated_bytes() -> int:
    """In use, in all arenas and in mappings of their own."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Info
    info = mallinfo()
    return info.uordblks + info.hblkhd


def train(
    method: Any, rank: int, group: Any, recorder: Any, leak: Callable[[Any], None], steps: int
) -> Iterator[int]:
    """Yields the number of every step that was made.

    Some have passes without sync before, in some the backward of a site raises, and some have
    other batches on every site.
    """
    torch.manual_seed(0)
    model = Net()
    session = og.distribute(model, method, group=group, recorder=recorder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        plain = step % PERIOD >= PERIOD - 20
        local = 2 * (step % 11 == 5 and not plain)
        raises = step % 47 == 30 and not plain
        for k in range(local + 1):
            rows = 1 + (step * 5 + rank + k) % 7 if step % 60 > 40 and not plain else 3
            boom = raises and k == local and rank == step % SITES
            loss = model(torch.arange(rows) % 5, raises=boom)
            quietly = suppress(ArithmeticError, og.StepDiscardedError)
            with session.no_sync() if k < local else nullcontext(), quietly:
                loss.backward()
            leak(loss)
        if not raises:
            optimizer.step()
            session.log(loss=loss.item())
        yield step
    session.detach()


def measured(tmp_path: Path, leak: Callable[[Any], None]) -> list[tuple[str, Held, Held]]:
    """What is held after the warm-up of each method and after its last step."""
    together = threading.Barrier(SITES)
    found: list[tuple[str, Held, Held]] = []

    def look(rank: int) -> Held | None:
        together.wait(60)
        seen = held() if rank == 0 else None
        together.wait(60)
        return seen

    def body(rank: int, group: Any) -> None:
        for method in METHODS.values():  # what is imported or kept for good when first used
            list(train(method, rank, group, og.JSONL(tmp_path / "first"), lambda loss: None, 60))
        for name, method in METHODS.items():
            seen: list[Held | None] = []
            recorder = og.JSONL(tmp_path / name)
            for step in train(method, rank, group, recorder, leak, STEPS):
                if step in (PERIOD - 1, STEPS - 1):
                    seen.append(look(rank))
            if rank == 0:
                found.append((name, *seen))

    _in_threads(body)
    return found


def _in_threads(body: Callable[[int, Any], None]) -> None:
    """As `run_ranks`, for as long as it takes."""
    store = dist.HashStore()
    with ThreadPoolExecutor(SITES, thread_name_prefix="rank ") as pool:
        make = partial(gloo_group, store, sites=SITES, timeout=TIMEOUT)
        groups = [future.result() for future in [pool.submit(make, r) for r in range(SITES)]]
        for future in [pool.submit(body, r, groups[r]) for r in range(SITES)]:
            future.result()


def assert_steady(early: Held, late: Held, steps: int) -> None:
    """Nothing grew with the steps between.

    Up to a dozen tensors wait for a cadence's turn, and the allocators take some memory once, in
    the first thousand steps; the rest of what is allowed is a share of an object or some bytes a
    step, less than what could be left behind in each.
    """
    grown = {name: getattr(late, name) - getattr(early, name) for name in Held._fields}
    assert grown["tensors"] <= 12, grown
    assert grown["blocks"] < 200 + steps / 2, grown
    assert grown["nbytes"] < 2_000_000 + 64 * steps, grown
    assert grown["resident_bytes"] < 8_000_000 + 64 * steps, grown
    assert grown["threads"] <= 0, grown
    assert grown["files"] <= 0, grown


@pytest.mark.alone  # what threads of other tests allocate would be counted, too
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_left_behind_by_steps(tmp_path):
    found = measured(tmp_path, leak=lambda loss: None)
    assert [name for name, _, _ in found] == list(METHODS)
    for _, early, late in found:
        assert_steady(early, late, STEPS - PERIOD)
