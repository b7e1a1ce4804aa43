"""Clipped sums with noise are those of samples one by one: norms, models, and under autocast.

With so little noise that nothing is to be seen of it, gradients take the way that they take with
noise: they are formed during backward where that takes little memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from by_sample import Gradients, SampleCase, by_sample, floats, ids, length, loss_of, times, total
from outergrad.layers.bare import BareRule
from outergrad.layers.norms import NormRule
from ranks import run_on_lasting_groups

CLIP, BATCH, LITTLE = 0.4, 8, 1e-9


class OfTable(nn.Module):
    """A norm of a table with as many rows as there are samples, which all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(5, 6)), nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.norm(self.table))


def texts() -> SampleCase:
    from outergrad_lab.data.dataset import Format
    from outergrad_lab.models.transformers import GPT

    model = GPT(Format(shape=(6,), classes=20, tokens=True, vocabulary=20), 16, 2)
    return SampleCase(model, ids(6))


def long_texts() -> SampleCase:
    """So many positions that gradients by sample take less memory than their rows."""
    from outergrad_lab.data.dataset import Format
    from outergrad_lab.models.transformers import GPT

    model = GPT(Format(shape=(70,), classes=20, tokens=True, vocabulary=20), 16, 2)
    return SampleCase(model, ids(70))


def residual() -> SampleCase:
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(72, 4)]
    return SampleCase(nn.Sequential(*layers), floats(3, 8, 8))


def normed(*norms: nn.Module) -> SampleCase:
    return SampleCase(nn.Sequential(nn.Linear(6, 8), *norms, nn.Linear(8, 4)), floats(7, 6))


def half_frozen() -> SampleCase:
    case = normed(nn.LayerNorm(8), nn.LayerNorm(8))
    case.model[1].weight.requires_grad_(False)
    case.model[2].bias.requires_grad_(False)
    return case


MODELS: dict[str, Callable[[], SampleCase]] = {
    "texts": texts,
    "long texts": long_texts,
    "residual": residual,
    "layer and rms norm": lambda: normed(nn.LayerNorm(8), nn.Tanh(), nn.RMSNorm(8)),
    "norm of two dimensions": lambda: normed(nn.LayerNorm((7, 8))),
    "no positions": lambda: SampleCase(
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GroupNorm(2, 8)), floats(6)
    ),
    "half frozen": half_frozen,
}


def built(name: str) -> SampleCase:
    torch.manual_seed(3)
    return MODELS[name]()


def of_autocast(case: SampleCase, site: int) -> list[Gradients]:
    """What each sample adds to the gradient of its site, by plain autograd under autocast."""
    model, x, found = copy.deepcopy(case.model), case.batches[site], []
    for one in x.split(1):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, one) / len(x)
        loss.backward()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found.append(
            {n: (0 * p if p.grad is None else p.grad).double() for n, p in trained.items()}
        )
    return found


def expected(case: SampleCase, one_by_one: Any = by_sample) -> Gradients:
    sites = range(len(case.batches))
    samples = [times(len(case.batches[s]), one) for s in sites for one in one_by_one(case, s)]
    return times(1 / BATCH, total([times(min(1.0, CLIP / length(s)), s) for s in samples]))


def shared(case: SampleCase, *, noise: float, autocast: bool = False) -> list[Gradients]:
    def body(rank, group):
        model = copy.deepcopy(case.model)
        private = og.Private(clip=CLIP, noise=noise, batch=BATCH)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, case.batches[rank])
        loss.backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return run_on_lasting_groups(2, body)


def farthest(found: Gradients, wanted: Gradients) -> float:
    """The largest error of a parameter, of its own length; or of the whole, if that is short."""
    least = 1e-3 * length(wanted)
    errors = [
        (found[n].double() - g).norm() / max(float(g.norm()), least) for n, g in wanted.items()
    ]
    return max(map(float, errors))


@pytest.mark.parametrize("noise", [0.0, LITTLE])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_sums(name, noise):
    case = built(name)
    for grads in shared(case, noise=noise):
        assert farthest(grads, expected(case)) < 2e-5


@pytest.mark.parametrize("noise", [0.0, LITTLE])
@pytest.mark.parametrize("name", ["texts", "long texts", "residual", "half frozen"])
def test_clipped_sums_under_autocast(name, noise):
    """They are as near to float64 as plain autograd of one sample after the other."""
    case = built(name)
    wanted, plain = expected(case), expected(case, of_autocast)
    error = length({n: plain[n] - g for n, g in wanted.items()}) / length(wanted)
    assert 1e-4 < error < 2e-2  # bfloat16 has eight bits
    for grads in shared(case, noise=noise, autocast=True):
        assert all(g.dtype == torch.float32 for g in grads.values())
        found = {n: grads[n].double() - g for n, g in wanted.items()}
        assert length(found) / length(wanted) < 1.5 * error
        assert farthest(grads, wanted) < 1.5 * farthest(plain, wanted)


def test_a_norm_of_what_samples_share_is_refused_by_name():
    """Also where it has as many rows as there are samples."""
    case = SampleCase(OfTable(), floats(5, 6, counts=(5, 5)))
    with pytest.raises(Exception, match=r"norm\.weight"):
        shared(case, noise=LITTLE)


def test_norms_stay_one_kernel(monkeypatch):
    """Nothing is copied for each sample."""
    forwards, plain = [], NormRule.forward
    monkeypatch.setattr(NormRule, "forward", lambda *a: (forwards.append(1), plain(*a))[1])
    monkeypatch.setattr(BareRule, "forward", lambda *_: pytest.fail("copies"))
    shared(built("layer and rms norm"), noise=LITTLE)
    assert forwards
