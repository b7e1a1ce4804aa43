"""A training step of GPT-2 small, or of another size, under each method.

One process is the only site, so nothing travels, and what a method adds to the step of `alone` is
its own work on the GPU:

- `ddp`: copies gradients into buckets and all-reduces them, with itself.
- `powersgd-2`: DDP with PyTorch's PowerSGD hook at rank 2, all weights in one bucket.
- `dense`, `dad`, `dad-activations`: with one site factors never pay, so these show what the hooks
  of a session cost and nothing else.
- `dad-always`: makes canonical factors of every layer (the tied weight excepted), packs them,
  and computes the gradients from them; `dad-always-activations`: the same with raw rows, the tied
  weight too.

The optimizer is plain SGD, which hides least. Methods take turns in rounds, every step has fresh
random tokens, and peak memory is that of the steps before the first round, model included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

import gpu_common as common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpu_common import Columns, Row
from gpu_gpt import GPT
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import outergrad as og
from outergrad.core.protocols import Method

_EXACT_STEPS = 2
"""Steps before PyTorch's hook begins to compress, the fewest it allows."""
_WARMUP_STEPS = _EXACT_STEPS + 2
"""Steps before the first round: the last of them does what later ones do."""


def ddp(model: nn.Module) -> nn.Module:
    """DDP with a group of its own, as every method has."""
    return DistributedDataParallel(model, process_group=dist.new_group())


def powersgd(model: nn.Module, rank: int) -> nn.Module:
    """DDP with the hook; one bucket, so that it compresses all weights together."""
    group = dist.new_group()
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1000)
    state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=_EXACT_STEPS)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def outergrad(model: nn.Module, method: Method) -> nn.Module:
    """A session of outergrad's."""
    og.distribute(model, method, group=dist.new_group())
    return model


METHODS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda model: model,
    "ddp": ddp,
    "powersgd-2": partial(powersgd, rank=2),
    "dense": partial(outergrad, method=og.Dense()),
    "dad": partial(outergrad, method=og.DAD()),
    "dad-activations": partial(outergrad, method=og.DAD(reveal="activations")),
    "dad-always": partial(outergrad, method=og.DAD(always=True)),
    "dad-always-activations": partial(outergrad, method=og.DAD(always=True, reveal="activations")),
}
"""From a model to what is trained."""

COLUMNS: Columns = {
    "method": lambda row: row["method"],
    "median ms": common.median_text,
    "quartiles": common.quartiles_text,
    "/ddp": common.number_text("ratio_to_ddp", ".3f"),
    "peak MB": common.number_text("peak_mb", ",.0f"),
}


def objection(options: argparse.Namespace) -> str | None:
    """What makes the options impossible, in one line."""
    if options.width % options.heads:
        return f"--width {options.width} is no multiple of --heads {options.heads}"
    if options.backend == "nccl" and options.device == "cpu":
        return "--backend nccl is for CUDA: leave it out"
    return None


def verify(_: argparse.Namespace) -> list[str]:
    """Nothing: the tests of outergrad compare its gradients with DDP's."""
    return []


def measure(options: argparse.Namespace, rows: list[Row]) -> None:
    """Adds a row per method."""
    names = options.methods or list(METHODS)
    progress = common.Progress(1 + len(names) * (1 + options.rounds))
    with one_process(options):
        contenders = []
        for contender in warmed_up(names, options, progress):
            contenders.append(contender)
            rows.append(contender.row)
        for turn in range(options.rounds):
            for contender in contenders:
                progress.next(f"round {turn + 1}/{options.rounds}: {contender.row['method']}")
                contender.run_block()
    progress.end()


def warmed_up(
    names: Sequence[str], options: argparse.Namespace, progress: common.Progress
) -> Iterator[Contender]:
    """Every method, ready for the first round."""
    shape = (options.batch, options.positions + 1)
    ids_BP = torch.zeros(shape, dtype=torch.int64, device=options.device)
    progress.next("starting")
    # Given up: what only the first ever allocates, such as cuBLAS's workspace, is no method's own.
    Contender("alone", ids_BP, options)
    for name in names:
        progress.next(f"warming up {name}")
        yield Contender(name, ids_BP, options)


@contextmanager
def one_process(options: argparse.Namespace) -> Iterator[None]:
    """A process group of this process alone."""
    backend = options.backend or {"cuda": "nccl", "cpu": "gloo"}[options.device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Contender:
    """A method that takes its turns, until it fails.

    Args:
        method: A key of `METHODS`.
        ids_BP: The tokens of a step, labels included; they are drawn anew for each.
        options: The command line's.

    Attributes:
        row: What was measured of it.
    """

    def __init__(self, method: str, ids_BP: Tensor, options: argparse.Namespace) -> None:
        self._options = options
        self._refresh = partial(ids_BP.random_, options.vocab)
        self._step: Callable[[], None] | None = None
        self.row: Row = {"method": method, "blocks_ms": []}
        self._attempt(partial(self._warm_up, method, ids_BP))

    def run_block(self) -> None:
        """One untimed step, then the timed ones of a round."""
        if self._step is not None:
            self._attempt(self._timed)

    def _attempt(self, figures: Callable[[], Row]) -> None:
        self.row.update(common.attempt(figures))
        if self.row["status"] != "ok":
            self._step = None
            common.free()

    def _warm_up(self, method: str, ids_BP: Tensor) -> Row:
        """Builds the model and measures the memory of its first steps."""
        used_mb = begin_peak_mb(self._options.device)
        self._step = trainer(method, ids_BP, self._options)
        for _ in range(_WARMUP_STEPS):
            self._refresh()
            self._step()
        return {"peak_mb": peak_mb() - used_mb} if self._options.device == "cuda" else {}

    def _timed(self) -> Row:
        clock = partial(common.times_ms, self._step, self._refresh, self._options.device)
        clock(1)
        blocks_ms = [*self.row["blocks_ms"], clock(self._options.steps)]
        return {"blocks_ms": blocks_ms, **common.summary([*chain(*blocks_ms)])}


def trainer(method: str, ids_BP: Tensor, options: argparse.Namespace) -> Callable[[], None]:
    """The training step of a fresh model, the same for all methods."""
    torch.manual_seed(0)
    shape = {
        key: getattr(options, key) for key in ("vocab", "positions", "width", "depth", "heads")
    }
    with torch.device(options.device):
        plain = GPT(**shape)
    model = METHODS[method](plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    low_precision = options.dtype == "bf16"

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=low_precision):
            logits = model(ids_BP[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids_BP[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    return step


def begin_peak_mb(device: str) -> float:
    """Forgets the peak so far; returns what is in use on the GPU now."""
    if device != "cuda":
        return 0.0
    common.free()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 1e6


def peak_mb() -> float:
    """The most that was in use since."""
    return torch.cuda.max_memory_allocated() / 1e6


def add_ratios(rows: list[Row]) -> None:
    """Adds the median over rounds of each method's time as a multiple of DDP's in that round."""
    fine = [row for row in rows if common.is_timed(row)]
    ddp_ms = next((row["blocks_ms"] for row in fine if row["method"] == "ddp"), None)
    for row in fine if ddp_ms else ():
        pairs = zip(row["blocks_ms"], ddp_ms, strict=False)  # an interrupted round is not whole
        ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
        row["ratio_to_ddp"] = statistics.median(ratios)
