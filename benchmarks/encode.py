"""What codecs make of normally distributed rows: bytes, error, and time on one thread.

    python benchmarks/encode.py --rows 32 --width 1024

With a workload, what they cost in a step: triplets of all its matrices are found, encoded, written
into a message and remembered. Encoding is what writing and reading the sent rows by itself takes.

    python benchmarks/encode.py --workload gpt --rank 16

With --memories as well, what each memory of error feedback makes of that time, at int8.

    python benchmarks/encode.py --workload gpt --rank 16 --memories

With --losses, what codecs of few bits lose of other rows, in the table after the best of four
clipping levels per group; the last are leading triplets of the GPT's gradients on Shakespeare.

    OUTERGRAD_DATA=... python benchmarks/encode.py --losses
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from canonical import median_ms
from compress import decaying
from compress import median_ms as medians_ms
from torch import Tensor, distributions
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.coding import (
    Codecs,
    decode,
    decode_all,
    encode,
    encode_all,
    nbytes,
    received,
    tensors,
)
from outergrad.linalg.low_rank import small_core
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.wire import BF16, Int2, Int3, Int4, Int8, Sign, TopK
from outergrad_lab.data import load
from outergrad_lab.workloads import WORKLOADS

CODECS = (
    (BF16(),),
    (Int8(),),
    (Int4(),),
    (Int3(),),
    (Int2(),),
    (Sign(),),
    (TopK(0.3),),
    (TopK(0.3), BF16()),
    (TopK(0.3), Int8()),
    (TopK(0.1), Int8()),
)


STEP_CODECS: dict[str, Codecs] = {
    "none": (),
    "bf16": (BF16(),),
    "int8": (Int8(),),
    "int4": (Int4(),),
    "int3": (Int3(),),
    "int2": (Int2(),),
}


class Matrix(NamedTuple):
    """A weight, its gradient in float32, and how many triplets of it are sent."""

    slot: og.Slot
    gradient_GOI: Tensor
    rows: int


def matrices(workload: str, rank: int) -> list[Matrix]:
    """All weights of a model, with gradients of falling singular values."""
    named = WORKLOADS[workload].build().named_parameters()
    weights = {name: p for name, p in named if p.dim() > 1}
    return [_matrix(n, len(p), p.numel() // len(p), rank) for n, p in weights.items()]


def _matrix(name: str, outputs: int, inputs: int, rank: int) -> Matrix:
    d_NO, a_NI = decaying(256, outputs), decaying(256, inputs)
    slot = og.Slot("", name, outputs=outputs, inputs=inputs)
    return Matrix(slot, (d_NO.mT @ a_NI)[None], min(rank, outputs, inputs))


def compression(
    found: list[Matrix], rank: int, wire: Codecs, memory: Any = "dense"
) -> Callable[[], object]:
    """Of all gradients of a step, until the message holds what is sent."""
    method = og.RankDAD(rank=rank, wire=wire, error_feedback=memory, reduce="gather")
    compressor = method.compressor()
    pieces = [Piece(m.slot, m.rows, torch.float32, None, compressor.codecs(m.slot)) for m in found]
    layout = Layout(0, {}, pieces)

    def step() -> None:
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        parts = [og.Part(m.slot, m.gradient_GOI, m.rows) for m in found]
        views = [view for _, view in layout.filled(message, og.Slot)]
        for view, payload in zip(views, compressor.compress(parts), strict=True):
            view.fill(payload)
        compressor.commit(applied=True)

    return step


def coding(found: list[Matrix], wire: Codecs) -> Callable[[], object]:
    """Writing and reading the rows that a step sends."""
    sides = [(m.rows, width) for m in found for width in (m.slot.outputs, m.slot.inputs)]
    rows = [torch.randn(1, count, width) for count, width in sides]

    def work() -> None:
        decode_all(wire, encode_all(wire, rows), rows)

    return work


def steps(workload: str, rank: int) -> None:
    """A table with a line per codec; the works take turns."""
    found = matrices(workload, rank)
    works = {name: compression(found, rank, wire) for name, wire in STEP_CODECS.items()}
    alone = {f"{name} alone": coding(found, w) for name, w in STEP_CODECS.items() if w}
    ms = medians_ms({**works, **alone}, 10)
    print("| codec | compression, ms | of which encoding, ms | share |")
    print("|---|---|---|---|")
    for name in works:
        own = ms.get(f"{name} alone", 0.0)
        print(f"| {name} | {ms[name]:.1f} | {own:.2f} | {own / ms[name]:.1%} |")


def memories(workload: str, rank: int) -> None:
    """A table with a line per memory; the works take turns."""
    found = matrices(workload, rank)
    kinds = ("dense", "auto", "factored", None)
    ms = medians_ms({str(m): compression(found, rank, (Int8(),), m) for m in kinds}, 10)
    print("| memory | compression, ms | over dense |")
    print("|---|---|---|")
    for name in ms:
        print(f"| {name} | {ms[name]:.1f} | {ms[name] / ms['dense']:.2f} |")


def best_of_four(bits: int, x: Tensor) -> Tensor:
    """What rows of 64 come back as, each at the clipping level with which it loses least."""
    half = 1 << (bits - 1)
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    steps = torch.stack([level * largest / -half for level in (1.0, 0.92, 0.8, 0.6)]).bfloat16()
    found = (x / steps).round().clamp(-half, half - 1) * steps
    best = (found - x).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return found.gather(0, best.expand_as(found[:1]))[0]


def triplets(rank: int = 32) -> Tensor:
    """Rows of 64 of the leading triplets of real gradients, after 20 steps."""
    torch.manual_seed(0)
    model = WORKLOADS["gpt"].build()
    data = load("tinyshakespeare", Path(os.environ["OUTERGRAD_DATA"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(20):
        rows = torch.randint(len(data.x_train), (8,))
        optimizer.zero_grad()
        cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        optimizer.step()
    weights = [p.grad for p in model.parameters() if p.dim() > 1 and p.grad is not None]
    found = [small_core(gradient[None], rank).factors() for gradient in weights]
    sides = [t.float() for f in found for t in (f.d_GRO, f.a_GRI) if t.shape[-1] % 64 == 0]
    x = torch.cat([t.reshape(-1, 64) for t in sides])
    return x[x.abs().amax(-1) > 0]


def losses() -> None:
    """A table with a line per kind of rows."""
    drawn = {
        "normal": distributions.Normal(0.0, 1.0),
        "two-sided exponential": distributions.Laplace(0.0, 1.0),
        "Student's t, 3 degrees of freedom": distributions.StudentT(3.0),
        "uniform": distributions.Uniform(-1.0, 1.0),
    }
    kinds = {name: one.sample((20_000, 64)) for name, one in drawn.items()}
    print("| lost, % of the norm | 4 bits | 3 bits | 2 bits |")
    print("|---|---|---|---|")
    for name, x in {**kinds, "triplets": triplets()}.items():
        cells = []
        for codec in (Int4(), Int3(), Int2()):
            found = received((codec,), x), best_of_four(codec.bits, x)
            own, four = (100 * ((y - x).norm() / x.norm()).item() for y in found)
            cells.append(f"{own:.2f} ({four:.2f})")
        print("|", " | ".join([name, *cells]), "|")


def main() -> None:
    """A table with a line per stack of codecs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--memories", action="store_true")
    parser.add_argument("--losses", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.losses:
        return losses()
    if options.workload and options.memories:
        return memories(options.workload, options.rank)
    if options.workload:
        return steps(options.workload, options.rank)
    x = torch.randn(1, options.rows, options.width)
    shape = tuple(x.shape)
    print("| codecs | times fewer bytes than float32 | error | to encode, ms | to decode, ms |")
    print("|---|---|---|---|---|")
    for codecs in CODECS:
        written = zip(encode(codecs, x), tensors(codecs, shape, x.dtype), strict=True)
        message = [t.to(plain.dtype) for t, plain in written]
        fewer = x.nbytes / nbytes(codecs, shape)
        error = ((received(codecs, x) - x).norm() / x.norm()).item()
        encode_ms = median_ms(partial(encode, codecs, x), 200)
        decode_ms = median_ms(partial(decode, codecs, message, shape, x.dtype), 200)
        name = ", ".join(map(repr, codecs))
        figures = f"{fewer:.2f} | {100 * error:.2g} % | {encode_ms:.3f} | {decode_ms:.3f}"
        print(f"| `{name}` | {figures} |")


if __name__ == "__main__":
    main()
