"""What bytes come to on a slow link, in words."""

from __future__ import annotations

import pytest
import torch
from pages import write_part

from made_up_run import DENSE_BYTES, write_run
from outergrad.report import load
from outergrad.report.summary import compared, cost_of_bytes, on_usual_link, pairwise, verdict


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (1000, "as many bytes as DDP"),
        (990, "as many bytes as DDP"),
        (500, "2.0 \N{MULTIPLICATION SIGN} fewer bytes than DDP"),
        (2000, "2.0 \N{MULTIPLICATION SIGN} more bytes than DDP"),
    ],
)
def test_bytes_are_compared_with_ddps(sent, said):
    assert compared(sent, 1000) == said


def test_the_seconds_are_those_of_the_bits():
    assert on_usual_link(12.5e6) == 1
    said = cost_of_bytes(125_000, 1_250_000)
    assert said.endswith("at 100 Mbit/s they take 10 ms of a step, DDP's 100 ms")


def test_a_run_is_told_in_a_sentence(tmp_path):
    told = verdict(load(write_run(tmp_path / "run", steps=400)))
    fewer, speed, agreement = told.split("; ")
    assert fewer == compared(9_000, DENSE_BYTES)
    rest = 0.1 - 4e-4 - 9e-3  # of a step, without compressing and waiting
    ratio = (rest + 8 * DENSE_BYTES / 1e8) / (rest + 4e-4 + 8 * 9_000 / 1e8)
    assert abs(ratio - 1) < 0.03
    assert speed == "at 100 Mbit/s about as fast"
    assert agreement == "the sites agree"


def test_of_a_run_without_steps_and_layers_nothing_is_told(tmp_path):
    assert verdict(load(write_part(tmp_path / "run", "run"))) == ""


@pytest.mark.parametrize("sites", [2, 3, 8])
@pytest.mark.parametrize("shared", [0.0, 0.3, 0.9])
def test_the_cosine_between_sites_is_that_of_gradients_of_one_length_and_angle(sites, shared):
    alike = torch.full((sites, sites), shared, dtype=torch.float64).fill_diagonal_(1)
    gradients = torch.linalg.cholesky(alike)
    cosine = torch.cosine_similarity(gradients, gradients.mean(0, keepdim=True))
    assert pairwise(cosine[0].item(), sites) == pytest.approx(shared, abs=1e-9)
