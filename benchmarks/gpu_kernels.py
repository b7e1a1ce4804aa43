"""Times of one weight's gradient: the product, its factors, PowerSGD of it.

A layer of n inputs and n outputs saw N rows of activations A and deltas Δ:

- `wgrad`: the product dW = Δᵀ A alone.
- `canonical`: what a site sends with `og.DAD()`, from A and Δ; dW is never formed. Where DAD
  would send dW itself at `--sites`, the row says "dense".
- `canonical+rebuild`: the same, and dW from the factors of all sites, which every site computes
  after the exchange; compare this one with PowerSGD, whose rows contain it too.
- `powersgd-R`: the product and PowerSGD of it at rank R, see `PowerSGD`.

Every call has fresh random A and Δ, and on CUDA nothing of them in the cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import gpu_common as common
import torch
from gpu_common import Columns, Row
from torch import Tensor

import outergrad as og
from outergrad.core.types import Unit
from outergrad.linalg.outer import weight_gradient

_CACHE_BYTES = 1 << 28
"""More than the second-level cache of any GPU so far."""

Work = Callable[[Tensor, Tensor], object]
"""What is timed: of d_NO and a_NI."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The weight and the batch.

    Attributes:
        size: Inputs, and as many outputs, of the layer.
        rows: Batch times positions.
        sites: Between which DAD would exchange.
        dtype: Of activations and deltas.
        device: "cuda" or "cpu".
    """

    size: int
    rows: int
    sites: int
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        return f"{self.size} x {self.size}, {self.rows} rows"

    @property
    def slot(self) -> og.Slot:
        """The layer as DAD sees it."""
        return og.Slot("layer", "weight", outputs=self.size, inputs=self.size)


def wgrad(d_NO: Tensor, a_NI: Tensor) -> Tensor:
    """The weight gradient, (O, I)."""
    return d_NO.mT @ a_NI


def canonical(problem: Problem) -> Work | None:
    """Canonical factors, where DAD would send them."""
    unit = Unit((problem.slot,), ("weight",), problem.size**2)
    pays = og.DAD().compressor().taps(unit, [[problem.rows]] * problem.sites)
    return partial(canonical_factors, problem.slot) if pays else None


def canonical_factors(slot: og.Slot, d_NO: Tensor, a_NI: Tensor) -> og.Factors:
    """The factors that DAD sends, rounded as on the wire."""
    compressor = og.DAD().compressor()
    raw = og.Factors(d_NO.unsqueeze(0), a_NI.unsqueeze(0))
    part = og.Part(slot, raw, compressor.sent_rows(slot, len(d_NO)))
    (factors,) = compressor.compress([part])
    return og.Factors(factors.d_GRO.to(d_NO.dtype), factors.a_GRI.to(a_NI.dtype))


def canonical_and_rebuild(problem: Problem) -> Work | None:
    """Canonical factors and the gradient from those of all sites, here its own several times."""
    factors_of = canonical(problem)

    def work(d_NO: Tensor, a_NI: Tensor) -> Tensor:
        d_GRO, a_GRI, _ = factors_of(d_NO, a_NI)
        every = og.Factors(d_GRO.repeat(1, problem.sites, 1), a_GRI.repeat(1, problem.sites, 1))
        return weight_gradient(every, 1.0 / problem.sites)

    return work if factors_of else None


class PowerSGD:
    """The product and PowerSGD's arithmetic on one site, as in PyTorch's hook for DDP.

    In it: M = Δᵀ A plus the error of the step before; Q, warm from the step before, made
    orthonormal; P = M Q, made orthonormal; Q = Mᵀ P; the approximation P Qᵀ; the new error
    M - P Qᵀ. Not in it: the all-reduces of P and Q, the division by the number of sites, the
    copies between gradients and buckets, and the batching of weights of one shape.
    Source: Vogels, Karimireddy and Jaggi, 2019, algorithms 1 and 2.
    """

    def __init__(self, problem: Problem, rank: int) -> None:
        size, like = problem.size, {"dtype": problem.dtype, "device": problem.device}
        self.error_OI = torch.zeros(size, size, **like)
        self.q_IR = torch.randn(size, min(rank, size), **like)

    def __call__(self, d_NO: Tensor, a_NI: Tensor) -> Tensor:
        """The approximation, (O, I)."""
        m_OI = wgrad(d_NO, a_NI).add_(self.error_OI)
        p_OR = orthonormal(m_OI @ orthonormal(self.q_IR))
        self.q_IR = m_OI.mT @ p_OR
        approximation_OI = p_OR @ self.q_IR.mT
        torch.sub(m_OI, approximation_OI, out=self.error_OI)
        return approximation_OI


def orthonormal(p_OR: Tensor) -> Tensor:
    """An orthonormal basis of the columns.

    QR where the hook uses it: not in bf16, which it cannot do, nor up to rank 2, where launching
    it costs more than Gram-Schmidt.
    """
    if p_OR.shape[1] > 2 and p_OR.dtype != torch.bfloat16:
        return torch.linalg.qr(p_OR)[0]
    p_OR = p_OR.clone()
    for r in range(p_OR.shape[1]):
        column, rest = p_OR[:, r : r + 1], p_OR[:, r + 1 :]
        column /= column.norm()
        if rest.shape[1]:
            rest -= column @ (column.mT @ rest)
    return p_OR


METHODS: dict[str, Callable[[Problem], Work | None]] = {
    "wgrad": lambda _: wgrad,
    "canonical": canonical,
    "canonical+rebuild": canonical_and_rebuild,
    **{f"powersgd-{rank}": partial(PowerSGD, rank=rank) for rank in (1, 2, 4, 8)},
}
"""From a problem to what is timed, None where the method would send dW itself."""

COLUMNS: Columns = {
    "weight": lambda row: f"{row['size']} x {row['size']}",
    "rows": lambda row: str(row["rows"]),
    "method": lambda row: row["method"],
    "median ms": common.median_text,
    "quartiles": common.quartiles_text,
    "/wgrad": common.number_text("ratio_to_wgrad", ".2f"),
}


def objection(_: argparse.Namespace) -> str | None:
    """None: every shape can be tried."""
    return None


def measure(options: argparse.Namespace, rows: list[Row]) -> None:
    """Adds a row per weight, batch and method."""
    jobs = list(product(problems(options), options.methods or METHODS))
    progress = common.Progress(len(jobs))
    for problem, method in jobs:
        progress.next(f"{problem}: {method}")
        figures = common.attempt(partial(timed, problem, method, options))
        rows.append({"size": problem.size, "rows": problem.rows, "method": method, **figures})
    progress.end()


def problems(options: argparse.Namespace) -> list[Problem]:
    """Every weight with every batch."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    like = {"sites": options.sites, "dtype": dtype, "device": options.device}
    pairs = product(options.sizes, options.rows)
    return [Problem(size=size, rows=rows, **like) for size, rows in pairs]


def timed(problem: Problem, method: str, options: argparse.Namespace) -> Row:
    """Median and quartiles of a method, or that it would send dW itself."""
    work = METHODS[method](problem)
    if work is None:
        return {"status": "dense"}
    inputs = Inputs(problem)
    call = partial(work, inputs.d_NO, inputs.a_NI)
    clock = partial(common.times_ms, call, inputs.refresh, problem.device)
    clock(options.warmup)
    return common.summary(clock(options.repeats))


class Inputs:
    """Random deltas and activations, drawn anew in place."""

    def __init__(self, problem: Problem) -> None:
        empty = partial(torch.empty, device=problem.device)
        self.d_NO = empty(problem.rows, problem.size, dtype=problem.dtype)
        self.a_NI = torch.empty_like(self.d_NO)
        self.filler = empty(_CACHE_BYTES if problem.device == "cuda" else 0, dtype=torch.uint8)
        self.refresh()

    def refresh(self) -> None:
        """Draws new values and pushes them out of the GPU's cache."""
        self.d_NO.normal_(std=1 / len(self.d_NO))  # as of a loss that is a mean over the rows
        self.a_NI.normal_()
        self.filler.zero_()


def add_ratios(rows: list[Row]) -> None:
    """Adds each method's time as a multiple of the product's."""
    fine = [row for row in rows if common.is_timed(row)]
    products = [row for row in fine if row["method"] == "wgrad"]
    product_ms = {(row["size"], row["rows"]): row["median_ms"] for row in products}
    for row in fine:
        if (row["size"], row["rows"]) in product_ms:
            row["ratio_to_wgrad"] = row["median_ms"] / product_ms[row["size"], row["rows"]]


# -- checks -----------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> list[str]:
    """The checks of `--verify`, with the smallest weight and every batch: a line each."""
    smallest = [p for p in problems(options) if p.size == min(options.sizes)]
    return [line for p in smallest for line in verified(p)] if options.verify else []


def verified(problem: Problem) -> list[str]:
    """Checks that what is timed computes the product.

    Raises:
        SystemExit: It does not.
    """
    inputs = Inputs(problem)
    d_NO, a_NI = inputs.d_NO, inputs.a_NI
    d_GRO, a_GRI, _ = canonical_factors(problem.slot, d_NO, a_NI)
    rounding = 4 * torch.finfo(problem.dtype).eps
    d_NO, a_NI = d_NO.double(), a_NI.double()
    exact_OI = wgrad(d_NO, a_NI)
    rebuilt_OI = wgrad(d_GRO[0].double(), a_GRI[0].double())
    precise = replace(problem, dtype=torch.float64)
    full, low = PowerSGD(precise, rank=problem.size), PowerSGD(precise, rank=2)
    low_OI = low(d_NO, a_NI)
    return [
        checked(f"canonical factors, {problem}", rebuilt_OI, exact_OI, rounding),
        checked(f"PowerSGD at full rank, {problem}", full(d_NO, a_NI), exact_OI, 1e-10),
        checked(f"PowerSGD at rank 2 + error, {problem}", low_OI + low.error_OI, exact_OI, 1e-10),
    ]


def checked(what: str, found: Tensor, exact: Tensor, tolerance: float) -> str:
    """Compares by the relative error of the whole matrix."""
    error = float((found - exact).norm() / exact.norm())
    if not error <= tolerance:  # NaN is an error, too
        raise SystemExit(f"gpu.py: {what}: relative error {error:.1e} is above {tolerance:.1e}")
    return f"verified: {what}: relative error {error:.1e}, at most {tolerance:.1e}"
