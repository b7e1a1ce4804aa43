"""Gradients by sample against a backward of each sample in float64, and against Opacus."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from examples.privacy import DPSGD
from torch import Tensor

import outergrad as og
from by_sample import SampleCase, by_sample, length, loss_of, times, total
from ranks import run_on_lasting_groups

CLOSE = 1e-5
"""Relative."""


class Seeing:
    """DP-SGD without noise that keeps the norms that it finds."""

    needs_samples = needs_all_layers = True

    def __init__(self, limit: float, seen: list[Tensor]) -> None:
        self._inner, self._seen = DPSGD(limit), seen

    def __repr__(self) -> str:
        return repr(self._inner)

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        self._seen.append(og.transforms.sample_norms(gradient))
        return self._inner(gradient)


def check_norms_and_clipped_mean(case: SampleCase, rules: Any = None) -> None:
    """DP-SGD without noise, half of whose samples are clipped, gives what the oracle does."""
    x, samples = case.batches[0], by_sample(case, 0)
    norms_B = torch.tensor([length(one) for one in samples], dtype=torch.float64)
    share = float(norms_B.median())
    expected = total(
        [times(min(1.0, share / n), one) for n, one in zip(norms_B.tolist(), samples, strict=True)]
    )

    def body(rank, group):
        model, seen = copy.deepcopy(case.model), []
        about = {"transform": Seeing(share * len(x), seen), "buffers": "local", "rules": rules}
        session = og.distribute(model, og.Dense(), group=group, **about)
        loss_of(model, x).backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters()}, seen

    ((grads, (found_B,)),) = run_on_lasting_groups(1, body)
    torch.testing.assert_close(found_B.double(), norms_B, rtol=CLOSE, atol=0)
    whole = length(expected)
    for name, wanted in expected.items():
        grad = grads[name]
        assert grad is not None or not wanted.any(), f"{name} has no gradient"
        if grad is not None:
            error = float((grad.double() - wanted).norm())
            assert error < max(CLOSE * float(wanted.norm()), 1e-7 * whole), f"{name}: {error:.1e}"


def check_opacus(case: SampleCase) -> None:
    """Opacus has the same norms; skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opacus = pytest.importorskip("opacus", reason="pip install opacus")
    model, x = opacus.GradSampleModule(copy.deepcopy(case.model)), case.batches[0]
    loss_of(model, x).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    squares = [p.grad_sample.double().flatten(1).square().sum(1) for p in trained]
    expected = torch.tensor([len(x) * length(one) for one in by_sample(case, 0)])
    torch.testing.assert_close(sum(squares).sqrt(), expected.double(), rtol=CLOSE, atol=0)
