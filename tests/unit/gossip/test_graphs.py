"""Graphs connect their sites, and their weights average."""

from __future__ import annotations

import math

import pytest
import torch

from outergrad.gossip.graphs import (
    NAMED,
    EdgeList,
    Exponential,
    Lossy,
    RandomPairs,
    Ring,
    edge_list,
    graph_of,
    neighbours,
    refuse_disconnected,
)
from outergrad.gossip.mixing import metropolis, mixing_matrix, push_weights, spectral_gap

SITES = {"torus": [4, 6, 9, 16, 20]}
STAR = EdgeList(((0, 1), (0, 2), (0, 3), (3, 4)))
UNDIRECTED = [
    *((graph, sites) for name, graph in NAMED.items() for sites in SITES.get(name, [1, 2, 5, 8])),
    (STAR, 5),
    (Lossy("torus", share=0.3), 6),
]
DIRECTED = [
    *((graph(True), sites) for graph in (Ring, Exponential) for sites in (1, 2, 5, 8)),
    (EdgeList(((0, 1), (1, 2), (2, 0), (1, 0), (2, 3), (3, 1)), directed=True), 4),
    (Lossy(Ring(True), share=0.3), 5),
    (Lossy(Exponential(True), share=0.3), 8),
]


def matrix(graph, sites, step=0):
    edges = graph.edges(sites, step)
    if graph.directed:
        return mixing_matrix(push_weights(edges), sites, directed=True)
    return mixing_matrix(metropolis(edges), sites)


def ones(sites):
    return torch.ones(sites, dtype=torch.float64)


def named(pair):
    return f"{type(pair[0]).__name__}-{pair[1]}"


@pytest.mark.parametrize("pair", UNDIRECTED, ids=named)
def test_weights_are_symmetric_and_doubly_stochastic(pair):
    graph, sites = pair
    for step in range(min(graph.period(sites), 9)):
        mixing = matrix(graph, sites, step)
        assert torch.equal(mixing, mixing.mT)
        torch.testing.assert_close(mixing.sum(dim=0), ones(sites), rtol=0, atol=1e-15)
        assert (mixing >= 0).all()
        assert (mixing.diagonal() > 0).all()


@pytest.mark.parametrize("pair", UNDIRECTED, ids=named)
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_they_stay_so_where_neighbours_are_away(pair, left_out):
    graph, sites = pair
    weights = metropolis(graph.edges(sites))
    there = dict(list(weights.items())[left_out:])
    mixing = mixing_matrix(there, sites)
    assert torch.equal(mixing, mixing.mT)
    torch.testing.assert_close(mixing.sum(dim=0), ones(sites), rtol=0, atol=1e-15)
    assert (mixing.diagonal() > 0).all()


@pytest.mark.parametrize("pair", DIRECTED, ids=named)
def test_push_weights_give_all_away_or_keep_it(pair):
    graph, sites = pair
    for step in range(graph.period(sites)):
        mixing = matrix(graph, sites, step)
        torch.testing.assert_close(mixing.sum(dim=0), ones(sites), rtol=0, atol=1e-15)
        assert (mixing.diagonal() > 0).all()


@pytest.mark.parametrize("pair", [*UNDIRECTED, *DIRECTED], ids=named)
def test_repeated_exchanges_average_over_all_sites(pair):
    graph, sites = pair
    product = torch.eye(sites, dtype=torch.float64)
    mixing = [matrix(graph, sites, step) for step in range(min(graph.period(sites), 60))]
    for step in range(400):
        product = mixing[step % len(mixing)] @ product
    start = torch.arange(sites, dtype=torch.float64)
    mass = product @ ones(sites)  # 1 where the matrices are doubly stochastic
    expected = torch.full_like(start, (sites - 1) / 2)
    torch.testing.assert_close((product @ start) / mass, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sites", [3, 4, 5, 8, 16])
def test_the_gap_of_a_ring(sites):
    values = [(1 + 2 * math.cos(2 * math.pi * k / sites)) / 3 for k in range(1, sites)]
    assert spectral_gap(matrix(NAMED["ring"], sites)) == pytest.approx(1 - max(map(abs, values)))


@pytest.mark.parametrize("sites", [2, 3, 8])
def test_the_gap_of_a_complete_graph_is_one(sites):
    assert spectral_gap(matrix(NAMED["complete"], sites)) == pytest.approx(1)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 4), (4, 5), (5, 5)])
def test_the_gap_of_a_torus(rows, columns):
    angles = [(i / rows, j / columns) for i in range(rows) for j in range(columns)][1:]
    wave = [[2 * math.cos(2 * math.pi * a) for a in pair] for pair in angles]
    values = [(1 + one + other) / 5 for one, other in wave]
    gap = spectral_gap(matrix(NAMED["torus"], rows * columns))
    assert gap == pytest.approx(1 - max(map(abs, values)))


@pytest.mark.parametrize("sites", [2, 4, 8, 16])
@pytest.mark.parametrize("graph", [Exponential(), Exponential(directed=True)])
def test_exponential_graphs_agree_after_a_period(graph, sites):
    product = torch.eye(sites, dtype=torch.float64)
    for step in range(graph.period(sites)):
        product = matrix(graph, sites, step) @ product
    torch.testing.assert_close(product, torch.full_like(product, 1 / sites))


@pytest.mark.parametrize("sites", [2, 7, 8])
def test_random_pairs_are_drawn_anew_alike_everywhere(sites):
    graph = RandomPairs(seed=3)
    drawn = [graph.edges(sites, step) for step in range(50)]
    assert drawn == [RandomPairs(seed=3).edges(sites, step) for step in range(50)]
    assert all(len(edges) == sites // 2 for edges in drawn)
    assert all(len({s for edge in edges for s in edge}) == sites // 2 * 2 for edges in drawn)
    if sites > 2:
        assert len(set(drawn)) > 10
        assert drawn != [RandomPairs(seed=4).edges(sites, step) for step in range(50)]


def test_neighbours_are_those_of_all_steps():
    assert neighbours(NAMED["ring"], 8, 0) == [1, 7]
    assert neighbours(NAMED["exponential"], 8, 0) == [1, 2, 4]
    assert neighbours(NAMED["random"], 4, 2) == [0, 1, 3]
    assert neighbours(NAMED["ring"], 1, 0) == []


def test_a_pair_may_be_drawn_that_was_not_drawn_in_a_period(monkeypatch):
    monkeypatch.setattr(RandomPairs, "period", lambda self, sites: 1)
    assert neighbours(RandomPairs(), 6, 2) == [0, 1, 3, 4, 5]
    refuse_disconnected(RandomPairs(), 6)


@pytest.mark.parametrize("graph", [NAMED["complete"], Ring(directed=True)])
def test_edges_are_lost_alike_everywhere_and_anew_in_each_step(graph):
    whole, steps = graph.edges(6), range(400)
    left = [Lossy(graph, share=0.25, seed=3).edges(6, step) for step in steps]
    assert left == [Lossy(graph, share=0.25, seed=3).edges(6, step) for step in steps]
    assert left != [Lossy(graph, share=0.25, seed=4).edges(6, step) for step in steps]
    assert all(set(edges) <= set(whole) for edges in left)
    for edge in whole:
        assert sum(edge in edges for edges in left) / 400 == pytest.approx(0.75, abs=0.1)
    assert [*Lossy(graph, share=0).edges(6)] == [*whole]
    assert {*Lossy(graph, share=0.25).all_edges(6)} == {*whole}


@pytest.mark.parametrize("share", [-0.1, 1, "0.1", float("nan")])
def test_shares_of_edges_that_cannot_be_lost(share):
    with pytest.raises(ValueError, match="use a number from 0 to below 1"):
        Lossy("ring", share=share)


def test_a_file_of_edges(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("# hospitals\n0 1\n1, 2  # by the river\n\n2 0\n")
    assert graph_of(path).edges(3) == ((0, 1), (0, 2), (1, 2))
    assert graph_of(str(path)) == edge_list(path)
    assert edge_list(path, directed=True).edges(3) == ((0, 1), (1, 2), (2, 0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 1\n1 1\n", r"edges.txt: .*rank 1 is its own neighbour"),
        ("0 1\n1 two\n", r"line 2: '1 two' is no edge"),
        ("0 1 2\n", r"line 1: '0 1 2' is no edge"),
        ("# nothing\n", "one pair or more"),
    ],
)
def test_a_file_that_is_no_graph(tmp_path, text, told):
    path = tmp_path / "edges.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        graph_of(path)


def test_other_numbers_of_sites_than_the_file_has():
    with pytest.raises(ValueError, match=r"edges are of 5 sites, rank 0 to 4, and there are 8"):
        refuse_disconnected(STAR, 8)
    with pytest.raises(ValueError, match="start 5 sites"):
        refuse_disconnected(STAR, 3)


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (EdgeList(((0, 1), (2, 3))), "does not connect rank 2 and rank 0 of 4 sites: add edges"),
        (EdgeList(((0, 1), (1, 2), (1, 3)), directed=True), "rank 1 and rank 0 of 4 sites both"),
    ],
)
def test_graphs_in_two_parts(graph, told):
    with pytest.raises(ValueError, match=told):
        refuse_disconnected(graph, 4)


@pytest.mark.parametrize("pair", [*UNDIRECTED, *DIRECTED], ids=named)
def test_all_others_are_connected(pair):
    refuse_disconnected(*pair)


def test_a_prime_number_of_sites_is_no_torus():
    with pytest.raises(ValueError, match="graph='torus' of 7 sites: 7 is no product"):
        refuse_disconnected(NAMED["torus"], 7)


@pytest.mark.parametrize("given", [Ring, 3, None])
def test_what_is_no_graph(given):
    with pytest.raises(TypeError, match="use 'ring', or a graph, as"):
        graph_of(given)


def test_an_unknown_name():
    with pytest.raises(ValueError, match="graph='rng' is no graph and no file; use 'ring'"):
        graph_of("rng")
