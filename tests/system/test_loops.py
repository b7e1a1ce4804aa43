"""What users of DDP take for granted in their loops, for every method."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outergrad as og
from covering import covering
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from ranks import run_on_lasting_groups
from watched import owed_by

pytestmark = pytest.mark.usefixtures("large_matrices")

SITES = 2


@pytest.fixture(params=SOME)
def method(request):
    return METHODS[request.param]


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def in_one(gradients: list[Tensor]) -> Tensor:
    """Some are zero but for rounding, as that of a bias below a norm."""
    return torch.cat([g.flatten() for g in gradients])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3, foreach=True),
    "adam fused": lambda params: torch.optim.Adam(params, lr=1e-3, eps=1e-3, fused=True),
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
}


@pytest.mark.parametrize(("method", "make"), covering(METHODS, OPTIMIZERS, quick=6, every=3))
def test_optimizers_with_clipping_follow_the_pooled_model(method, make):
    def step(model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()

    batches = [[(1 / SITES, batch(site, k)) for site in range(SITES)] for k in range(5)]
    expected = pooled(step, batches, make)

    def body(rank, group):
        model = net()
        optimizer = make(model.parameters())
        og.distribute(model, method, group=group)
        for k in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(rank, k)).backward()
            step(model, optimizer)
        return parameters_of(model)

    first, second = run_on_lasting_groups(SITES, body)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert_close(first, expected, 2e-4)


def test_averages_and_copies_of_the_model_are_plain_and_equal(method):
    """EMA by PyTorch's `AveragedModel`, and by a deep copy that is updated by hand."""

    def body(rank, group):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session = og.distribute(model, method, group=group)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        twin = copy.deepcopy(model)
        for k in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(rank, k)).backward()
            optimizer.step()
            averaged.update_parameters(model)
            with torch.no_grad():
                for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                    p.copy_(q if k == 0 else torch.lerp(q, p, 0.9))
        assert type(averaged.module) is type(net())
        sent = session.stats().total_sent_bytes
        for other in (averaged, twin):
            loss_of(other, batch(rank, 0)).backward()  # of this site alone
        assert session.stats().total_sent_bytes == sent
        return parameters_of(averaged.module), parameters_of(twin)

    first, second = run_on_lasting_groups(SITES, body)
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert_close(first[0], [p.double() for p in first[1]], 1e-6)


def scaled_backward(
    model: nn.Module, scaler: GradScaler, x: Tensor, dtype: torch.dtype, *, overflow: bool
) -> None:
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, x)
    scaler.scale(loss * float("inf") if overflow else loss).backward()


class Made(NamedTuple):
    """A step of one site.

    Attributes:
        model: as it was before.
        gradients: by name, without the scale of the loss.
        owed: by name, what the site had not sent after this step less what it had not before.
    """

    model: nn.Module
    gradients: dict[str, Tensor]
    owed: dict[str, Tensor]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_an_overflow_on_one_site_makes_every_scaler_skip(method, dtype):
    """And the steps around it are as right as autograd makes them in 16 bits."""
    steps, bad = 4, 1

    def body(rank, group):
        model, scaler = net(), GradScaler("cpu", init_scale=64.0, growth_interval=100)
        session, made, owed = og.distribute(model, method, group=group), [], {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for k in range(steps):
            x, before, scale = batch(rank, k), parameters_of(model), scaler.get_scale()
            optimizer.zero_grad()
            overflow = k == bad and rank == 1
            scaled_backward(model, scaler, x, dtype, overflow=overflow)
            scaler.unscale_(optimizer)
            earlier, owed = owed, {name: t.clone() for name, t in owed_by(session).items()}
            if k != bad:
                found = {name: p.grad.double() for name, p in model.named_parameters()}
                more = {name: (t - earlier.get(name, 0)) / scale for name, t in owed.items()}
                made.append(Made(net_like(model), found, more))
            else:
                assert all(torch.equal(t, earlier[name]) for name, t in owed.items())
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(p, q) for p, q in zip(before, parameters_of(model), strict=True))
            assert same == (k == bad)
            assert scaler.get_scale() == (scale / 2 if k == bad else scale)
        return parameters_of(model), made

    (first, ours), (second, theirs) = run_on_lasting_groups(SITES, body)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    good = [k for k in range(steps) if k != bad]
    for k, *sites in zip(good, ours, theirs, strict=True):
        check_beside_autograd(sites, k, dtype, method)


def net_like(model: nn.Module) -> nn.Module:
    """A plain network with the parameters of a distributed one."""
    plain = net()
    plain.load_state_dict(model.state_dict())
    return plain


def check_beside_autograd(
    sites: Sequence[Made], step: int, dtype: torch.dtype, method: Any
) -> None:
    """Compares gradients with those of replicas that nobody shares, and of one in float64.

    Rounding has full rank, so that sums of sketches leave something of each step to the next ones.
    How much goes by how well the sketch meets the gradient: the bound is the rounding over the
    sine of the smallest angle between the rows of this batch and what the sketch kept of the last
    ones (Halko, Martinsson and Tropp, 2011, theorem 9.1), so the figure is one of luck. What is
    exact is the sum: a step's gradient and what the sites owe more than before are the mean. Other
    methods leave nothing.
    """
    sketched = method in (METHODS["powersgd"], METHODS["all_reduce"])
    model = sites[0].model
    exact, alone = copy.deepcopy(model).double(), [copy.deepcopy(model) for _ in sites]
    exact.zero_grad()
    for site, replica in enumerate(alone):
        (loss_of(exact, batch(site, step).double()) / SITES).backward()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(replica, batch(site, step))
        (64 * loss).backward()
    usual = [sum(ps).double() / SITES for ps in zip(*map(unscaled, alone), strict=True)]
    for (name, q), by_autograd in zip(exact.named_parameters(), usual, strict=True):
        found = sites[0].gradients[name]
        owed = sum(site.owed.get(name, torch.zeros(())) for site in sites) / SITES
        room = 1.5 * (by_autograd - q.grad).norm() / q.grad.norm() + 2e-3
        assert (found + owed - q.grad).norm() / q.grad.norm() < room, name
        assert (found - q.grad).norm() / q.grad.norm() < (0.25 if sketched else room), name


def unscaled(model: nn.Module) -> list[Tensor]:
    return [p.grad / 64 for p in model.parameters()]


def test_accumulation_in_no_sync_follows_the_pooled_model(method):
    steps, passes = 3, 2

    def step(model, optimizer):
        optimizer.step()

    def make(params):
        return torch.optim.SGD(params, lr=0.05)

    def rows(rank, k):
        return [batch(rank, 10 * k + p, rows=2) for p in range(passes)]

    batches = [
        [(1 / (SITES * passes), x) for site in range(SITES) for x in rows(site, k)]
        for k in range(steps)
    ]
    expected = pooled(step, batches, make)

    def body(rank, group):
        model = net()
        session = og.distribute(model, method, group=group)
        optimizer = make(model.parameters())
        for k in range(steps):
            optimizer.zero_grad()
            *earlier, last = rows(rank, k)
            with session.no_sync():
                for x in earlier:
                    (loss_of(model, x) / passes).backward()
            (loss_of(model, last) / passes).backward()
            optimizer.step()
        return parameters_of(model)

    first, second = run_on_lasting_groups(SITES, body)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert_close(first, expected, 2e-4)


class Reader(nn.Module):
    """Reads sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory = nn.Embedding(50, 40), nn.GRU(40, 48, batch_first=True)
        self.block = nn.TransformerEncoderLayer(48, 2, 64, dropout=0.0, batch_first=True)
        self.last = nn.Linear(48, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.block(self.memory(self.first(ids))[0])).mean(dim=1)


torch.manual_seed(0)
READER = Reader()
IDS = [
    [torch.randint(0, 50, (2, length)) for length in lengths] for lengths in ((5, 8, 2), (7, 3, 8))
]


EXACT = {name: METHODS[name] for name in ("dense", "dad", "dad raw", "edad")}


@pytest.mark.parametrize("exact", EXACT.values(), ids=EXACT)
def test_sequences_of_other_lengths_on_each_site_and_step(exact):
    def body(rank, group):
        model = copy.deepcopy(READER)
        og.distribute(model, exact, group=group)
        gradients = []
        for ids in IDS[rank]:
            model.zero_grad()
            loss_of(model, ids).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        return gradients

    found = run_on_lasting_groups(SITES, body)[0]
    for k, gradients in enumerate(found):
        model = copy.deepcopy(READER).double()
        for site in range(SITES):
            (loss_of(model, IDS[site][k]) / SITES).backward()
        expected = [p.grad for p in model.parameters()]
        assert_close([in_one(gradients)], [in_one(expected)], 5e-6)


IMAGES = [
    torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(site)) for site in range(SITES)
]
torch.manual_seed(1)
CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(4, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 40, 3),
    nn.Flatten(),
    nn.Linear(1440, 8),
)
CHANNELS_LAST = {name: m for name, m in METHODS.items() if name not in ("edad", "per layer")}
CHANNELS_LAST["edad"] = og.EDAD(blocks=["2"], always=True)


@pytest.mark.parametrize("method", CHANNELS_LAST.values(), ids=CHANNELS_LAST)
def test_channels_last(method):
    """The model and its inputs, as for tensor cores; gradients keep the layout of parameters."""
    layouts = []

    def body(rank, group):
        model = copy.deepcopy(CONVOLUTIONS).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        og.distribute(model, method, group=group)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            x = IMAGES[rank].to(memory_format=torch.channels_last)
            model(x).square().mean().backward()
            found.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
        layouts.append(model[0].weight.is_contiguous(memory_format=torch.channels_last))
        return found[0], parameters_of(model)

    (first, ours), (_, theirs) = run_on_lasting_groups(SITES, body)
    reference = copy.deepcopy(CONVOLUTIONS).double()
    for x in IMAGES:
        (reference(x.double()).square().mean() / SITES).backward()
    limit = 1e-5 if not isinstance(method, og.RankDAD | og.PowerSGD) else 1.0
    assert_close(first, [p.grad for p in reference.parameters()], limit)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert all(layouts)


class _SumOverSites(torch.autograd.Function):
    """As SyncBatchNorm's collectives: in forward and, of the deltas, in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        return _summed(delta, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    return whole


class NormOverSites(nn.Module):
    """A batch norm of the rows of all sites; PyTorch's own takes no CPU tensors."""

    def __init__(self, width: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.group = nn.Parameter(torch.linspace(0.5, 1.5, width)), group

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0] * (1 if self.group is None else self.group.size())
        mean = self._sum(x.sum(0)) / rows
        variance = self._sum((x - mean).square().sum(0)) / rows
        return self.weight * (x - mean) / (variance + 1e-3).sqrt()

    def _sum(self, x: Tensor) -> Tensor:
        return x if self.group is None else _SumOverSites.apply(x, self.group)


def test_a_norm_over_the_sites_may_use_the_same_group(method):
    """Its collectives come between ours, in forward and in backward, in one order everywhere."""

    def with_norms(group):
        model = net()
        model.norm = NormOverSites(48, group)
        return nn.Sequential(model, NormOverSites(12, group))

    patterns = {f"0.{name}": m for name, m in getattr(method, "methods", {}).items()}
    if patterns:
        patterns["1.*"] = og.Dense()
    nested = og.PerLayer(patterns) if patterns else method
    nested = og.EDAD(blocks=["0.block"], always=True) if method == METHODS["edad"] else nested

    def body(rank, group):
        model = with_norms(group)
        og.distribute(model, nested, group=group)
        for k in range(4):
            model.zero_grad()
            model(batch(rank, k)).square().sin().mean().backward()
        return [p.grad for p in model.parameters()]

    reference = with_norms(None).double()
    x = torch.cat([batch(site, 3) for site in range(SITES)])
    reference(x.double()).square().sin().mean().backward()
    for found in run_on_lasting_groups(SITES, body):
        assert_close([in_one(found)], [in_one([p.grad for p in reference.parameters()])], 2e-5)
