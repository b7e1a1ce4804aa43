"""Models that nobody here wrote: no gradient has a larger rank than its bound."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo_case import deprecated_calls
from zoo_runs import batch_of, built, loss_of
from zoo_table import ZOO

from covering import rest_slow
from outergrad.spectra import numerical_rank, rank_bounds

SMALL = [name for name, case in ZOO.items() if case.quick]


@pytest.mark.parametrize("name", rest_slow(list(ZOO), SMALL))
def test_no_gradient_has_a_larger_rank_than_its_bound(name):
    case, model = ZOO[name], copy.deepcopy(built(name))
    batch = batch_of(case, 0, 0)
    with deprecated_calls(), case.context():
        bounds = rank_bounds(model, **batch)
        rounded = torch.bfloat16 if torch.is_autocast_enabled("cpu") else None
    loss_of(case, model, batch).backward()
    weights = dict(model.named_parameters())
    measured = {bound.weight: weights[bound.weight].grad for bound in bounds}
    assert any(gradient is not None for gradient in measured.values())
    for bound in bounds:
        gradient = measured[bound.weight]
        if gradient is not None:
            assert numerical_rank(gradient.flatten(1), rounded) <= bound.bound, bound
