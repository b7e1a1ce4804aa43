"""Fingerprints: they tell outputs apart that differ by more than rounding."""

from __future__ import annotations

import pytest
import torch

from outergrad.replay.fingerprint import fingerprint, is_like, never_like, tolerance

CPU = torch.device("cpu")
ROOM = tolerance([torch.float32], CPU, same_machine=True)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 7), (3, 4, 65), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_same_output_is_like_itself(shape, dtype):
    y = torch.randn(shape).to(dtype)
    assert is_like(fingerprint([y]), fingerprint([y.clone()]), 0.0)


CHANGES = {
    "sign": lambda y: -y,
    "transposed rows": lambda y: y.flip(0),
    "rolled": lambda y: y.roll(1, -1),
    "shifted": lambda y: y + 0.01,
    "scaled": lambda y: y * 1.001,
    "one row": lambda y: torch.cat([y[:1] * 2, y[1:]]),
    "noise": lambda y: y + 0.01 * torch.randn_like(y),
    "one more row": lambda y: torch.cat([y, y[:1]]),
    "not finite": lambda y: y * float("nan"),
}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("change", CHANGES)
def test_another_output_is_not(change, seed):
    torch.manual_seed(seed)
    y = torch.randn(33, 48)
    assert not is_like(fingerprint([y]), fingerprint([CHANGES[change](y)]), ROOM)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_within_the_tolerance(dtype, seed):
    """Of each number, a few times."""
    torch.manual_seed(seed)
    y = torch.randn(33, 48, dtype=torch.float64)
    again = y
    for _ in range(4):
        again = (again * 1.7).to(dtype).double() / 1.7
    room = tolerance([dtype], CPU, same_machine=False)
    assert is_like(fingerprint([y]), fingerprint([again]), room)


def test_what_is_not_finite_cannot_be_compared():
    y = torch.tensor([1.0, float("inf")])
    assert is_like(fingerprint([y]), fingerprint([y]), ROOM)


def test_nothing_is_like_never():
    y = torch.randn(3, 4)
    assert not is_like(never_like(fingerprint([y])), fingerprint([y]), ROOM)


def test_no_stream_is_drawn_from():
    before = torch.get_rng_state()
    fingerprint([torch.ones(3, 5)])
    assert torch.get_rng_state().equal(before)
