"""The noise scale of a run, against gradients whose signal and noise are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from made_up_run import events, write_run
from outergrad.events import Layer
from outergrad.record.jsonl import JSONL
from outergrad.report import load
from outergrad.report.summary import noise_scale


def write_gradients(folder, gradients: torch.Tensor):
    """A run whose layers had such gradients, (steps, sites, layers, numbers)."""
    sites, means = gradients.shape[1], gradients.mean(1)
    for rank in range(sites):
        recorder = JSONL(folder, every=1)
        number = dict[int, int]()
        for event in events(rank, sites, len(gradients), 1, 1.7e9):
            told = event
            if isinstance(event, Layer):
                k = number[event.step] = number.get(event.step, -1) + 1
                own, mean = gradients[event.step, rank, k], means[event.step, k]
                told = replace(event, gradient_norm=own.norm().item(), mean_norm=mean.norm().item())
            recorder.record(told)
        recorder.close()
    return load(folder)


@pytest.mark.parametrize(("sites", "noise"), [(2, 0.5), (2, 2.0), (4, 8.0)])
def test_it_is_the_variance_of_a_sites_gradient_over_the_signal(tmp_path, sites, noise):
    torch.manual_seed(0)
    signal = torch.nn.functional.normalize(torch.randn(3 * 400), dim=0).view(3, 400)
    own = signal + torch.randn(120, sites, 3, 400) * (noise / 1200) ** 0.5
    assert noise_scale(write_gradients(tmp_path / "run", own)) == pytest.approx(noise, rel=0.1)


def test_gradients_that_are_equal_have_no_noise(tmp_path):
    own = torch.randn(8, 1, 3, 20).expand(-1, 2, -1, -1)
    assert noise_scale(write_gradients(tmp_path / "run", own)) == pytest.approx(0, abs=1e-5)


def test_without_a_signal_or_other_sites_it_is_not_known(tmp_path):
    own = torch.randn(8, 1, 3, 20)
    opposite = torch.cat([own, -own], dim=1)
    assert noise_scale(write_gradients(tmp_path / "run", opposite)) is None
    assert noise_scale(load(write_run(tmp_path / "alone", sites=1))) is None
