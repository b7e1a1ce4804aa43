"""Sums of weighted samples, and their norms, do not depend on whether products are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_site_gradient import GROUPS, PLAIN, SLOTS, TALL, B, gradient_of

from outergrad.linalg import sample_sums
from outergrad.linalg.sample_sums import SampleSums
from outergrad.transforms import formed, sample_norms, scaled_samples

COUNTS = [[1, 1, 1, 1], [9, 9, 9, 9], [70, 70, 70, 70], [2, 0, 5, 90]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("most", [0, 2, 1000])
def test_norms_and_sums(name, counts, most, monkeypatch):
    monkeypatch.setattr(sample_sums, "_MOST", most)
    gradient, factor_B = gradient_of(SLOTS[name], counts), torch.rand(B, dtype=torch.float64)
    sums = SampleSums(gradient)
    torch.testing.assert_close(sums.norms(), sample_norms(gradient))
    found, expected = sums.summed(factor_B), formed(scaled_samples(gradient, factor_B))
    assert not found.rows
    assert found.formed.keys() == expected.formed.keys()
    for parameter, whole in expected.formed.items():
        torch.testing.assert_close(found.formed[parameter], whole)


@pytest.mark.parametrize(("slot", "kept"), [(PLAIN, 9), (GROUPS, 9), (TALL, 70)])
def test_products_are_kept_where_they_take_little_memory(slot, kept):
    """At most twice that of the rows."""
    few, many = (gradient_of([slot], [count] * B) for count in (1, kept))
    wide = slot.outputs * slot.inputs
    assert 2 * (slot.outputs + slot.inputs) < wide or slot in (PLAIN, GROUPS)
    assert bool(SampleSums(few)._kept) == (wide <= 2 * (slot.outputs + slot.inputs))
    assert SampleSums(many)._kept


def test_parameters_without_rows_are_zero():
    gradient = gradient_of([PLAIN], [2, 2, 2, 2])
    other = {**gradient.params, "other": torch.zeros(3, dtype=torch.float64)}
    found = SampleSums(replace(gradient, params=other)).summed(torch.ones(B, dtype=torch.float64))
    assert not found.formed["other"].any()


def test_unknown_samples_are_refused():
    gradient = gradient_of([PLAIN], [2, 2, 2, 2])
    unknown = {slot: part._replace(samples_N=None) for slot, part in gradient.rows.items()}
    for rows, whole in ((unknown, {}), ({}, {"a.weight": torch.ones(3, 5)})):
        with pytest.raises(ValueError, match="needs_samples = True"):
            SampleSums(replace(gradient, rows=rows, formed=whole)).norms()
