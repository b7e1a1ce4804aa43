"""Weighted sums of samples are those of weighted rows, and need no gradient of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_site_gradient import SLOTS, B, gradient_of

from outergrad.linalg.sample_products import as_vectors, bias_sums, products
from outergrad.linalg.sample_sums import weighted_sum
from outergrad.transforms import formed, sample_norms, scaled_samples

COUNTS = [[1, 1, 1, 1], [9, 9, 9, 9], [70, 70, 70, 70], [2, 0, 5, 90]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", SLOTS)
def test_sums(name, counts):
    gradient, factor_B = gradient_of(SLOTS[name], counts), torch.rand(B, dtype=torch.float64)
    found, expected = weighted_sum(gradient, factor_B), formed(scaled_samples(gradient, factor_B))
    assert not found.rows
    assert found.formed.keys() == expected.formed.keys()
    for parameter, whole in expected.formed.items():
        torch.testing.assert_close(found.formed[parameter], whole)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", SLOTS)
def test_formed_gradients_have_the_norms_and_the_sums_of_rows(name, whole, counts):
    """Also where some slots of a parameter have rows and others are formed."""
    gradient, factor_B = gradient_of(SLOTS[name], counts), torch.rand(B, dtype=torch.float64)
    rows = {}
    for k, (slot, part) in enumerate(gradient.rows.items()):
        if slot.lookup or (k and not whole):
            rows[slot] = part
        elif whole:
            rows |= as_vectors(slot, *products(slot, part, B))
        else:
            bias = None if slot.bias is None else bias_sums(part, B)
            rows |= {slot._replace(bias=None): part, **as_vectors(slot, None, bias)}
    instead = replace(gradient, rows=rows)
    torch.testing.assert_close(sample_norms(instead), sample_norms(gradient))
    found, expected = weighted_sum(instead, factor_B), weighted_sum(gradient, factor_B)
    for parameter, g in expected.formed.items():
        torch.testing.assert_close(found.formed[parameter], g)


def test_parameters_without_rows_are_zero():
    gradient = gradient_of(SLOTS["plain"], [2, 2, 2, 2])
    other = {**gradient.params, "other": torch.zeros(3, dtype=torch.float64)}
    found = weighted_sum(replace(gradient, params=other), torch.ones(B, dtype=torch.float64))
    assert not found.formed["other"].any()


def test_unknown_samples_are_refused():
    gradient = gradient_of(SLOTS["plain"], [2, 2, 2, 2])
    unknown = {slot: part._replace(samples_N=None) for slot, part in gradient.rows.items()}
    for rows, whole in ((unknown, {}), ({}, {"a.weight": torch.ones(3, 5)})):
        with pytest.raises(ValueError, match="needs_samples = True"):
            weighted_sum(
                replace(gradient, rows=rows, formed=whole), torch.ones(B, dtype=torch.float64)
            )
