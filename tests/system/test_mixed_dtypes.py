"""Models whose parameters have several dtypes, real and complex, by every method.

At two sites short sums meet receives that were posted for them a step ahead, in the order of the
messages (docs/design.md): a message more per dtype must not upset that order.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_all_methods import METHODS
from torch import Tensor, nn

import outergrad as og
from covering import covering
from outergrad.comm import cost
from outergrad.comm import torch as torch_comm
from outergrad.comm.work import SUMS_LANE
from ranks import run_on_lasting_groups
from sites_apart import plain

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
MIXTURES = {
    "f16": [F16],
    "bf16": [BF16],
    "f32": [F32],
    "c64": [C64],
    "f32, f16": [F32, F16],
    "f32, bf16": [F32, BF16],
    "f16, bf16": [F16, BF16],
    "f32, f64": [F32, F64],
    "f64, f32": [F64, F32],
    "f32, c64": [F32, C64],
    "c64, f32": [C64, F32],
    "f64, c128": [F64, C128],
    "f32, c128": [F32, C128],
    "c64, c128": [C64, C128],
    "f16, bf16, f32, f64, c64, c128": [F16, BF16, F32, F64, C64, C128],
}
AT_THREE = ["bf16", "f32, f64", "f16, bf16, f32, f64, c64, c128"]
TWO = {f"{mixture}-2": (mixture, 2) for mixture in MIXTURES}
THREE = {f"{mixture}-3": (mixture, 3) for mixture in AT_THREE}
ALL = {**TWO, **THREE}
SOME = {
    **{f"{mixture}-2": (mixture, 2) for mixture in [*AT_THREE, "c64, f32", "f64, c128"]},
    "f32, f64-3": ("f32, f64", 3),
}
RANK = 8
EXACT: dict[str, Any] = {
    "dense": og.Dense(),
    "auto": og.Auto(),
    "dad": og.DAD(always=True),
    "dad, raw rows": og.DAD(always=True, reveal="activations"),
    "dad, where it pays": og.DAD(),
    "edad": og.EDAD(always=True),
    # of a rank that the mean of so few rows does not exceed
    "rank-dad, gathered": og.RankDAD(rank=RANK, reduce="gather"),
    "rank-dad, merged": og.RankDAD(rank=RANK, reduce="two_way"),
    "rank-dad, all-reduced": og.RankDAD(rank=RANK, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=RANK, min_ratio=1),
    "sparse": og.Sparse(density=1.0, always=True),
    "sparse, added up": og.Sparse(density=1.0, select="random", always=True),
}
LOSSY: dict[str, Any] = {
    **{name: method for name, method in METHODS.items() if name not in EXACT},
    "powersgd": METHODS["powersgd"],
    "rank-dad, all-reduced": og.RankDAD(rank=1, reduce="all_reduce"),
    "rank-dad, all-reduced, tolerance": og.RankDAD(rank=4, reduce="all_reduce", tolerance=0.3),
    "powersgd, bf16": og.PowerSGD(rank=2, min_ratio=1, wire=og.wire.BF16()),
    "every second": og.PowerSGD(rank=2, min_ratio=1, every=2),
}
OF_CHANGES = [name for name in EXACT if name.split(", ")[0] not in ("auto", "dad", "edad")]
"""What `og.LocalSteps` takes: a change over several steps has no factors of a backward."""
LIMITS = {F16: 5e-3, BF16: 4e-2, F32: 1e-5, F64: 1e-9, C64: 1e-5, C128: 1e-9}
STEPS, WIDTH, ROWS = 6, 24, 2


class Net(nn.Module):
    """A layer, a vector and a matrix of each dtype."""

    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=d) for d in dtypes])
        self.vectors = nn.ParameterList([torch.ones(WIDTH, dtype=d) for d in dtypes])
        self.matrices = nn.ParameterList([torch.eye(WIDTH, dtype=d) for d in dtypes])

    def forward(self, x: Tensor) -> Any:
        parts = zip(self.layers, self.vectors, self.matrices, strict=True)
        outs = [(layer(x.to(v.dtype)) * v) @ m for layer, v, m in parts]
        return sum((y * y.conj()).real.sum() / ROWS for y in outs)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(
        ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)
    ).half()


def exact_copy(original: Net) -> Net:
    """The same in float64 and complex128."""
    net = copy.deepcopy(original)
    for p in net.parameters():
        p.data = p.data.to(C128 if p.is_complex() else F64)
    return net


def gradients(net: Net, x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    net(x).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def pooled(net: Net, step: int, sites: int) -> dict[str, Tensor]:
    own = [gradients(net, batch(rank, step)) for rank in range(sites)]
    return {name: torch.stack([g[name] for g in own]).mean(dim=0) for name in own[0]}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative; the imaginary parts count."""
    assert found.is_complex() == expected.is_complex()
    return ((found.to(expected.dtype) - expected).norm() / expected.norm()).item()


def trained(original: Net, method: Any, sites: int) -> list[dict[str, Tensor]]:
    """The gradients of all steps, once they are seen to be the same on all sites to the bit."""

    def body(rank: int, group: Any) -> list[dict[str, Tensor]]:
        net = copy.deepcopy(original)
        session = og.distribute(net, method, group=group)
        found = [gradients(net, batch(rank, step)) for step in range(STEPS)]
        session.detach()
        return found

    first, *others = run_on_lasting_groups(sites, body)
    if getattr(method, "every", 1) > 1:  # what is between is each site's own
        first, *others = ([steps[k] for k in range(1, STEPS, 2)] for steps in (first, *others))
    for theirs in others:
        assert all(a[n].equal(b[n]) for a, b in zip(first, theirs, strict=True) for n in a)
    return first


@pytest.mark.parametrize(("name", "case"), covering(list(EXACT), ALL, quick=12, every=6))
def test_gradients_are_the_mean(name: str, case: tuple[str, int]) -> None:
    mixture, sites = case
    torch.manual_seed(0)
    original = Net(MIXTURES[mixture])
    reference = exact_copy(original)
    for step, found in enumerate(trained(original, EXACT[name], sites)):
        expected = pooled(reference, step, sites)
        assert found.keys() == expected.keys()
        for n, g in found.items():
            assert error(g, expected[n]) < LIMITS[g.dtype], (step, n)


@pytest.mark.parametrize(("name", "case"), covering(list(LOSSY), SOME, quick=12, every=6))
def test_lossy_methods_give_all_sites_the_same(name: str, case: tuple[str, int]) -> None:
    """Vectors travel as they are, where the method has no codecs for them."""
    mixture, sites = case
    torch.manual_seed(0)
    original = Net(MIXTURES[mixture])
    reference = exact_copy(original)
    for step, found in enumerate(trained(original, LOSSY[name], sites)):
        assert found.keys() == dict(original.named_parameters()).keys()
        if getattr(LOSSY[name], "every", 1) > 1:
            continue
        expected = pooled(reference, step, sites)
        for n, g in found.items():
            assert g.isfinite().all()
            if n.startswith("vectors") and not getattr(LOSSY[name], "vectors", ()):
                assert error(g, expected[n]) < LIMITS[g.dtype], (step, n)


@pytest.mark.parametrize(("name", "case"), covering(list(OF_CHANGES), SOME, quick=6, every=3))
def test_weights_of_local_steps_are_the_mean(name: str, case: tuple[str, int]) -> None:
    mixture, sites = case
    torch.manual_seed(0)
    original = Net(MIXTURES[mixture])
    lr = 0.01

    def body(rank: int, group: Any) -> list[dict[str, Tensor]]:
        net = copy.deepcopy(original)
        session = og.distribute(net, og.LocalSteps(1, outer=plain, method=EXACT[name]), group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        found = []
        for step in range(STEPS):
            gradients(net, batch(rank, step))
            optimizer.step()
            found.append({n: p.detach().clone() for n, p in net.named_parameters()})
        session.flush()
        session.detach()
        return found

    first, *others = run_on_lasting_groups(sites, body)
    for theirs in others:
        assert all(a[n].equal(b[n]) for a, b in zip(first, theirs, strict=True) for n in a)
    reference = exact_copy(original)
    for step, found in enumerate(first):
        grads = pooled(reference, step, sites)
        for n, p in reference.named_parameters():
            p.data -= lr * grads[n]
            assert error(found[n], p.data) < LIMITS[found[n].dtype], (step, n)


class Large(nn.Module):
    """A table too large to go along with sketches, and layers; all in one dtype.

    Messages go in the reverse order of registration.
    """

    def __init__(self, *, table_first: bool = True) -> None:
        super().__init__()
        table = nn.EmbeddingBag(3000, WIDTH, mode="max")
        if table_first:
            self.table = table
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = table

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return (self.second(self.first(x)) + self.table(ids)).square().mean()


ONE_DTYPE = {
    "a dense part": {"table.*": og.Dense(), "*": og.PowerSGD(rank=8, min_ratio=1)},
    "sums of another method": {
        "first.*": og.Sparse(density=1.0, select="random", always=True),
        "*": og.PowerSGD(rank=8, min_ratio=1),
    },
    "two of two rounds": {
        "first.*": og.RankDAD(rank=8, reduce="all_reduce"),
        "*": og.PowerSGD(rank=8, min_ratio=1),
    },
}


@pytest.fixture
def far_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a link of a long delay: sums of a megabyte meet posted receives, too."""
    for module in (cost, torch_comm):
        monkeypatch.setattr(module, "ADDED_BYTES", 1 << 20)


def large_gradients(net: Large, rank: int, step: int) -> dict[str, Tensor]:
    net.zero_grad()
    x = batch(rank, step).to(net.first.weight.dtype)
    net(x, torch.arange(ROWS)[:, None] + ROWS * step).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", ONE_DTYPE)
def test_other_sums_behind_sketches_in_one_dtype(name: str, sites: int, far_link: None) -> None:
    torch.manual_seed(0)
    original = Large()
    reference = copy.deepcopy(original).double()

    def body(rank: int, group: Any) -> list[dict[str, Tensor]]:
        net = copy.deepcopy(original)
        session = og.distribute(net, og.PerLayer(ONE_DTYPE[name]), group=group)
        found = [large_gradients(net, rank, step) for step in range(STEPS)]
        session.detach()
        return found

    first, *others = run_on_lasting_groups(sites, body)
    for step, found in enumerate(first):
        own = [large_gradients(reference, rank, step) for rank in range(sites)]
        for n, g in found.items():
            assert all(g.equal(theirs[step][n]) for theirs in others)
            assert error(g, torch.stack([o[n] for o in own]).mean(dim=0)) < LIMITS[F32], (step, n)


@pytest.mark.parametrize("table_first", [True, False])
def test_sums_before_sketches_keep_their_posted_receives(
    table_first: bool, far_link: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    original, posted = Large(table_first=table_first), [0, 0]
    expect = torch_comm.TorchComm.expect

    def counted(self: Any, sizes: Any, turn: int, dtype: Any = torch.uint8, lane: int = 0) -> None:
        posted[self.rank] += lane == SUMS_LANE
        expect(self, sizes, turn, dtype, lane)

    monkeypatch.setattr(torch_comm.TorchComm, "expect", counted)

    def body(rank: int, group: Any) -> None:
        net = copy.deepcopy(original)
        method = og.PerLayer({"table.*": og.Dense(), "*": og.PowerSGD(rank=8, min_ratio=1)})
        session = og.distribute(net, method, group=group)
        for step in range(STEPS):
            large_gradients(net, rank, step)
        session.detach()

    run_on_lasting_groups(2, body)
    assert posted[0] == posted[1]
    assert posted[0] == 0 if table_first else posted[0] >= STEPS
