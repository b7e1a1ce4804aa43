"""A budget is divided as if triplet by triplet, and energies are means over steps."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
import torch

from outergrad.methods.low_rank.energies import Energies
from outergrad.methods.low_rank.sharing import shared_out


def one_by_one(energies_LK, costs_LK, spare):
    """Gives the next triplet to the layer where it is worth most, as long as it fits."""
    layers, width = energies_LK.shape
    more = [0] * layers

    def worth(k):
        known = more[k] < width
        return energies_LK[k, more[k]] / max(1, costs_LK[k, more[k]]) if known else 0.0

    waiting = [(-worth(k), k) for k in range(layers)]
    heapq.heapify(waiting)
    while waiting:
        value, k = heapq.heappop(waiting)
        if not value or costs_LK[k, more[k]] > spare:
            continue
        spare -= costs_LK[k, more[k]]
        more[k] += 1
        heapq.heappush(waiting, (-worth(k), k))
    return more


@pytest.mark.parametrize("spare", [-5.0, 0.0, 40.0, 900.0, 5000.0, 1e9])
@pytest.mark.parametrize("seed", range(12))
def test_all_at_once_gives_what_one_by_one_gives(seed, spare):
    """Also where layers are alike, costs rise and fall, or little is known of a layer."""
    random = np.random.default_rng(seed)
    layers, width = random.integers(1, 9), random.integers(0, 40)
    energies = np.sort(random.exponential(size=(layers, width)))[:, ::-1].copy()
    energies[random.integers(layers)] = energies[0]
    for layer in range(layers):
        energies[layer, random.integers(width + 1) :] = 0.0
    costs = random.integers(1, 90, size=(layers, 1)) + 16.0 * random.integers(0, 2, (1, width))
    assert shared_out(energies, costs, spare).tolist() == one_by_one(energies, costs, spare)


def means_of(steps, *noted):
    energies = Energies(steps)
    for sigma in noted:
        energies.note(("layer", None), torch.tensor([sigma]))
        energies.commit(applied=True)
    return energies.means[("layer", None)].tolist()


def test_energies_are_means_over_the_last_steps():
    """Of a triplet that was found for the first time, or not now, what is known of it."""
    assert means_of(4, [2.0, 1.0]) == [4.0, 1.0]
    assert means_of(2, [2.0, 1.0], [4.0, 2.0, 1.0]) == [10.0, 2.5, 1.0]
    assert means_of(2, [2.0, 1.0, 1.0], [0.0]) == [2.0, 1.0, 1.0]
    assert means_of(1, [2.0, 1.0], [1.0]) == [1.0, 1.0]


def test_a_step_that_does_not_count_changes_no_energies():
    energies = Energies(4)
    energies.note(("layer", None), torch.ones(1, 2))
    assert not energies.commit(applied=False)
    assert not energies.commit(applied=True)
    assert not energies.means
    assert energies.steps == 0


def test_values_that_are_not_finite_leave_the_means_as_they_are():
    """A mean with NaN would stay so, and the layer would have no share in any later step."""
    assert means_of(4, [2.0, 1.0], [math.nan, 1.0]) == [4.0, 1.0]
    assert means_of(4, [math.inf, 1.0], [2.0, 1.0]) == [4.0, 1.0]


def test_squares_of_extreme_values_stay_in_range():
    energies = Energies(4)
    for place, sigma in {("first", None): [1e200, 1e199], ("second", None): [2e200, 1e150]}.items():
        energies.note(place, torch.tensor([sigma], dtype=torch.float64))
    assert energies.commit(applied=True)
    assert energies.means[("first", None)] == pytest.approx([1.0, 0.01])
    assert energies.means[("second", None)] == pytest.approx([4.0, 1e-100])
