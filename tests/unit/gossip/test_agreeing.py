"""How fast sites agree, or part, with an outer momentum: by the eigenvalues of one period."""

from __future__ import annotations

import pytest
import torch

import outergrad as og
from outergrad.gossip import Choco, PowerGossip, metropolis, mixing_matrix
from outergrad.gossip.agreeing import growth, refuse_parting
from outergrad.gossip.graphs import NAMED
from ranks import run_on_lasting_groups
from sites_apart import model


def largest_eigenvalue(graph, sites, momentum, rounds=1):
    """Of the steps of one period on (y, last y), per step, but for the mean of all sites."""
    apart = torch.eye(sites, dtype=torch.float64) - 1 / sites
    unit, zero = torch.eye(sites, dtype=torch.float64), torch.zeros(sites, sites).double()
    product, period = torch.eye(2 * sites, dtype=torch.float64), graph.period(sites)
    for step in range(period):
        mixing = unit
        for one in range(step * rounds, (step + 1) * rounds):
            mixing = mixing_matrix(metropolis(graph.edges(sites, one)), sites) @ mixing
        top = torch.cat([apart @ (mixing + momentum * unit), -momentum * apart], dim=1)
        product = torch.cat([top, torch.cat([apart, zero], dim=1)]) @ product
    return float(torch.linalg.eigvals(product).abs().max()) ** (1 / period)


@pytest.mark.parametrize("sites", [4, 8, 12])
@pytest.mark.parametrize("momentum", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("name", ["ring", "torus", "complete", "exponential"])
def test_growth_is_the_largest_eigenvalue_of_a_period(name, momentum, sites):
    found = growth(NAMED[name], sites, momentum)
    assert found == pytest.approx(largest_eigenvalue(NAMED[name], sites, momentum), rel=0.01)


def test_rounds_count_as_one_exchange():
    found = growth(NAMED["exponential"], 8, 0.9, rounds=3)
    assert found == pytest.approx(largest_eigenvalue(NAMED["exponential"], 8, 0.9, 3), rel=0.01)
    assert found < 1 < growth(NAMED["exponential"], 8, 0.9)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("name", ["ring", "torus", "complete"])
def test_on_a_graph_that_stays_the_same_every_momentum_lets_sites_agree(name, momentum):
    refuse_parting(og.Gossip(name, momentum=momentum), 16)


@pytest.mark.parametrize(
    ("momentum", "parts"), [(0.3, False), (0.5, False), (0.6, True), (0.9, True)]
)
def test_some_sequences_of_moved_and_unmoved_directions_part_above_a_half(momentum, parts):
    """The largest eigenvalue of the steps on (z, last z), over all sequences of up to ten."""
    steps = [torch.tensor([[x + momentum, -momentum], [1, 0]]).double() for x in (0.0, 1.0)]
    products, growths = [torch.eye(2).double()], []
    for count in range(1, 11):
        products = [step @ product for step in steps for product in products]
        largest = torch.linalg.eigvals(torch.stack(products)).abs().max()
        growths.append(float(largest) ** (1 / count))
    assert (max(growths) > 1 + 1e-6) is parts


@pytest.mark.parametrize(
    "method", [PowerGossip(), PowerGossip(rank=4), Choco(reduce=og.wire.Sign(), gamma=0.2)]
)
def test_what_is_told_in_part_has_half_of_a_momentum_at_most(method):
    refuse_parting(og.Gossip("ring", method, momentum=0.5), 8)
    with pytest.raises(ValueError, match=r"use momentum=0\.5 or less"):
        refuse_parting(og.Gossip("ring", method, momentum=0.6), 8)
    refuse_parting(og.Gossip("ring", method, momentum=0.9), 1)


@pytest.mark.parametrize("name", ["exponential", "random"])
def test_the_remedy_of_what_is_refused_works_and_more_does_not(name):
    with pytest.raises(ValueError, match="drives 8 sites apart on the graph") as told:
        refuse_parting(og.Gossip(name, momentum=0.95), 8)
    good = float(str(told.value).partition("use momentum=")[2].partition(" ")[0])
    refuse_parting(og.Gossip(name, momentum=good), 8)
    with pytest.raises(ValueError, match=f"use momentum={good} or less"):
        refuse_parting(og.Gossip(name, momentum=good + 0.1), 8)


def test_all_sites_refuse_before_the_first_step():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"momentum=0.99 drives 4 sites apart"):
            og.distribute(model(), og.Gossip("random", momentum=0.99), group=group)

    run_on_lasting_groups(4, body)
