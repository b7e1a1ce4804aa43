"""From rows to the mean gradient: low rank on factors beside PyTorch's PowerSGD hook.

The hook's time is that of a backward of one layer under DistributedDataParallel, in which the
weight gradient is computed, compressed and expanded; ours, from the same activations and deltas to
the same gradient. A single process, so that nobody waits for a link. Memory is what each keeps
between steps.

    python benchmarks/compress.py --width 2048 --rows 512 --rank 32
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import outergrad as og
from outergrad.linalg.outer import stack, weight_gradient
from outergrad.methods.low_rank.memory import Memory

SITES = 2
"""The expansion is of what two sites send."""


def decaying(rows: int, width: int) -> Tensor:
    """Rows along mixed directions of falling size, as in training."""
    return torch.randn(rows, width) * torch.arange(1, width + 1).pow(-0.5)


class Hook:
    """Backward of a layer whose gradient goes through PyTorch's hook."""

    def __init__(self, rank: int, a_NI: Tensor, d_NO: Tensor) -> None:
        layer = nn.Linear(a_NI.shape[1], d_NO.shape[1], bias=False)
        self._model, self._a_NI, self._d_NO = DistributedDataParallel(layer), a_NI, d_NO
        self.state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
        )
        self._model.register_comm_hook(self.state, powerSGD_hook)

    def __call__(self) -> None:
        """A backward; the forward before it is a part of its time that `forward` gives."""
        self._model.zero_grad()
        self._model(self._a_NI).backward(self._d_NO)

    def forward(self) -> None:
        """A forward alone."""
        self._model(self._a_NI)


def gathered(
    compressor: Any, slot: og.Slot, factors: og.Factors, *, formed: bool
) -> Callable[[], Tensor]:
    """Triplets of this site, and the mean of two sites' from theirs."""
    rows = compressor.sent_rows(slot, factors.d_GRO.shape[1], 0)

    def step() -> Tensor:
        part = og.Part(slot, gradient(factors, formed=formed), rows)
        (found,) = compressor.compress([part])
        compressor.commit(applied=True)
        return weight_gradient(stack([found] * SITES), 1 / SITES)

    return step


def reduced(
    compressor: Any, slot: og.Slot, factors: og.Factors, *, formed: bool
) -> Callable[[], Tensor]:
    """Sketches of this site, and the mean from their sums."""
    sketches = compressor.sketches

    def step() -> Tensor:
        turned = sketches.turn(slot, sketches.begin(slot, gradient(factors, formed=formed)))
        found = sketches.end(slot, turned, 1)
        compressor.commit(applied=True)
        return weight_gradient(found)

    return step


def gradient(factors: og.Factors, *, formed: bool) -> og.Factors | Tensor:
    """As the method takes it."""
    return factors.d_GRO.mT @ factors.a_GRI if formed else factors


def median_ms(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians; the works take turns."""
    for work in works.values():
        for _ in range(4):  # the hook's first steps are not compressed, ours start cold
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def kept_bytes(tensors: object) -> int:
    """Bytes of what all tensors inside, in whatever containers, are views of."""
    return sum(_storages(tensors).values())


def _storages(tensors: object) -> dict[int, int]:
    if isinstance(tensors, Tensor):
        storage = tensors.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(tensors, Memory):
        return _storages([tensors.q_GIR, tensors.residual])
    parts = tensors.values() if isinstance(tensors, Mapping) else tensors
    if not isinstance(parts, Iterable) or isinstance(parts, str):
        return {}
    return {key: size for part in parts for key, size in _storages(part).items()}


def parse() -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=2048, help="I and O")
    parser.add_argument("--rows", type=int, default=512, help="N")
    parser.add_argument("--rank", type=int, default=32, help="R")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Prints a line per method."""
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        measure(options)
        dist.destroy_process_group()


def measure(options: argparse.Namespace) -> None:
    """Time and memory of every method on one gradient."""
    width, rank = options.width, options.rank
    a_NI, d_NO = (decaying(options.rows, width) for _ in range(2))
    slot, factors = og.Slot("", "weight", width, width), og.Factors(d_NO[None], a_NI[None])
    hook = Hook(rank, a_NI, d_NO)
    methods = {
        "og.PowerSGD": og.PowerSGD(rank=rank, min_ratio=1),
        "gather": og.RankDAD(rank=rank, reduce="gather"),
        "gather, no feedback": og.RankDAD(rank=rank, reduce="gather", error_feedback=None),
        "all_reduce": og.RankDAD(rank=rank, reduce="all_reduce"),
        "all_reduce, no feedback": og.RankDAD(rank=rank, reduce="all_reduce", error_feedback=None),
    }
    works: dict[str, Callable[[], object]] = {"hook": hook, "forward": hook.forward}
    compressors = {name: method.compressor() for name, method in methods.items()}
    for name, compressor in compressors.items():
        way = gathered if name.startswith("gather") else reduced
        works[name] = way(compressor, slot, factors, formed=name == "og.PowerSGD")
    times = median_ms(works, options.rounds)
    times["hook"] -= times.pop("forward")
    kept = {
        name: kept_bytes(compressor._memories.held()) for name, compressor in compressors.items()
    }
    state = hook.state
    kept["hook"] = kept_bytes([state.error_dict, state.p_memory_dict, state.q_memory_dict])
    print(f"N={options.rows}, I=O={width}, R={rank}, {options.threads} thread(s)")
    for name, ms in times.items():
        speed, share = times["hook"] / ms, kept[name] / kept["hook"]
        print(f"{name:24} {ms:8.2f} ms  {speed:5.1f} x as fast  memory {share:7.1%} of the hook's")


if __name__ == "__main__":
    main()
