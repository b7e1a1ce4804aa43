"""Small gradients by sample that are joined have the norms, bounds and sums that each has alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outergrad.core.transform import SiteGradient
from outergrad.core.types import Slot
from outergrad.linalg import joined
from outergrad.linalg.joined import row_each, small_of
from outergrad.linalg.roundings import roundings
from outergrad.linalg.sample_sums import weighted_sum
from outergrad.linalg.site_gradient import sample_norms

B = 5


def slot_of(name, size):
    return Slot(name, f"{name}.weight", size, 1, vector=True)


def gradient_of(sizes, dtypes=(torch.float32,)):
    torch.manual_seed(0)
    rows, params = {}, {}
    for k, size in enumerate(sizes):
        slot, dtype = slot_of(f"l{k}", size), dtypes[k % len(dtypes)]
        rows[slot] = row_each(torch.randn(B, size, dtype=dtype))
        params[slot.weight] = torch.zeros(size, dtype=dtype)
    return SiteGradient(rows, {}, params, B)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.float64]])
def test_norms_bounds_and_sums_are_those_of_each_alone(dtypes, monkeypatch):
    gradient, factor_B = gradient_of([3, 64, 7, 128, 9000, 200], dtypes), torch.rand(B)
    found = sample_norms(gradient), roundings(gradient), weighted_sum(gradient, factor_B).formed
    monkeypatch.setattr(joined, "_SMALL", 0)
    assert not small_of(gradient.rows, gradient.rows)
    alone = sample_norms(gradient), roundings(gradient), weighted_sum(gradient, factor_B).formed
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[1], alone[1])
    assert found[2].keys() == alone[2].keys()
    for name, g in alone[2].items():
        assert found[2][name].dtype == g.dtype
        torch.testing.assert_close(found[2][name], g)


def test_small_ones_of_one_type_are_joined_and_no_rows_of_others():
    gradient = gradient_of([3, 64, 9000], [torch.float32])
    first, second, _ = gradient.rows
    assert [*small_of(gradient.rows, gradient.rows)] == [first, second]
    part = gradient.rows[second]
    scaled = part._replace(factors=part.factors._replace(a_GRI=2 * part.factors.a_GRI))
    others = part._replace(samples_N=torch.zeros(B, dtype=torch.int64))
    for odd in (scaled, others):
        rows = {**gradient.rows, second: odd}
        assert [*small_of(rows, rows)] == [first]
        whole = replace(gradient, rows=rows)
        expected = {n: g.clone() for n, g in weighted_sum(whole, torch.ones(B)).formed.items()}
        d_BE = odd.factors.d_GRO[0] * odd.factors.a_GRI[0]
        torch.testing.assert_close(expected[second.weight], d_BE.sum(0))
