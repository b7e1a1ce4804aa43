"""Gossip with an outer momentum, and with letters that travel while sites make steps."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from covering import covering
from gossip_sites import Site, flat
from outergrad.gossip import Choco, PowerGossip, metropolis, mixing_matrix
from outergrad.gossip.graphs import NAMED
from ranks import run_on_lasting_groups, run_ranks
from sites_apart import model, train

METHODS = {
    "whole": None,
    "power": PowerGossip(),
    "choco": Choco(reduce=og.wire.TopK(0.2), gamma=0.2),
}
OUTER = {
    "momentum": {"momentum": 0.5},
    "rate": {"lr": 0.7},
    "both": {"lr": 0.7, "momentum": 0.4},
    "neither": {},
}


class OuterSite(Site):
    """A site that can be asked how it would go on alone, and what its momentum still moves."""

    def change_alone(self, start, stop):
        """Returns how the weights would change by the site's own steps; leaves them as they are."""
        alone, lr = copy.deepcopy(self.model), self.optimizer.param_groups[0]["lr"]
        train(alone, [SGD(alone.parameters(), lr=lr)], self.rank, range(start, stop))
        return weights_of(alone) - weights_of(self.model)

    def be_patient(self, seconds):
        self.session._updates._at.comm.patience_s = seconds

    def invariant(self, momentum):
        """Weights less the momentum that is still to come: the mean of all stays without steps."""
        last = flat(self.session._updates._outer._last)
        return (weights_of(self.model) - momentum * last) / (1 - momentum)


def weights_of(net):
    return flat([p.detach() for p in net.parameters()])


def of(net, vector):
    """Puts a vector into a model's weights."""
    nn.utils.vector_to_parameters(vector.clone(), net.parameters())


def reference(graph, sites, steps, *, every=1, rounds=1, lr=1.0, momentum=0.0, overlap=0):
    """The recursion of all sites in one process, with the mixing matrix."""
    nets = [model().double() for _ in range(sites)]
    optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
    start = torch.stack([*map(weights_of, nets)])
    last, moves, exchanges = start, None, 0
    for number in range(1, steps + 1):
        for rank, net in enumerate(nets):
            train(net, [optimizers[rank]], rank, [number - 1])
        now = torch.stack([*map(weights_of, nets)])
        if moves is not None and (number - overlap) % every == 0:
            now, start, moves = now + moves, start + moves, None
        if number % every == 0:
            y = start + lr * (now - start)
            mixed = y
            for index in range(rounds):
                edges = NAMED[graph].edges(sites, exchanges * rounds + index)
                mixed = mixing_matrix(metropolis(edges), sites) @ mixed
            now = y + momentum * (y - last)
            moves = mixed - y
            if not overlap:
                now, moves = now + moves, None
            start, last, exchanges = now, y, exchanges + 1
        for net, x in zip(nets, now, strict=True):
            of(net, x)
    return now


@pytest.mark.parametrize(
    ("graph", "outer", "often"),
    covering(
        list(NAMED), list(OUTER), ["1", "2", "1, twice", "2, behind 1", "2, behind 2"], quick=8
    ),
)
def test_every_site_follows_the_recursion_with_the_matrix_of_the_graph(graph, outer, often):
    sites = 4
    settings = {
        "1": {},
        "2": {"every": 2},
        "1, twice": {"rounds": 2},
        "2, behind 1": {"every": 2, "overlap": 1},
        "2, behind 2": {"every": 2, "overlap": 2},
    }[often] | OUTER[outer]
    expected = reference(graph, sites, 7, **settings)

    def body(rank, group):
        site = OuterSite(og.Gossip(graph, **settings), rank, group).steps(0, 7)
        found = weights_of(site.model)
        site.session.detach()
        return found

    found = torch.stack(run_on_lasting_groups(sites, body))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("outer", ["momentum", "both"])
def test_the_mean_over_sites_goes_as_by_nesterov_s_momentum_without_a_graph(name, outer):
    """SGD of PyTorch, in one process, on the mean of what the sites' own steps change."""
    method = og.Gossip("ring", METHODS[name], every=2, **OUTER[outer])

    def body(rank, group):
        site = OuterSite(method, rank, group)
        changes, weights = [], []
        for number in range(0, 10, 2):
            changes.append(site.change_alone(number, number + 2))
            weights.append(weights_of(site.steps(number, number + 2).model))
        site.session.detach()
        return changes, weights

    results = run_on_lasting_groups(4, body)
    mean = nn.Parameter(weights_of(model().double()))
    optimizer = SGD([mean], **({"lr": 1.0} | OUTER[outer]), nesterov=True)
    for number in range(5):
        mean.grad = -sum(changes[number] for changes, _ in results) / 4
        optimizer.step()
        found = sum(weights[number] for _, weights in results) / 4
        torch.testing.assert_close(found, mean.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "outer", "overlap", "saved_after"),
    covering(list(METHODS), list(OUTER), [0, 1, 2, 3], [3, 4, 5], quick=12, every=3),
)
def test_a_saved_training_goes_on_to_the_bit(name, outer, overlap, saved_after):
    settings = {"every": 3, "overlap": overlap} | OUTER[outer]
    method = og.Gossip("ring", METHODS[name], **settings)

    def straight(rank, group):
        site = OuterSite(method, rank, group, momentum=0.9).steps(0, saved_after)
        parts = (site.model, site.optimizer, site.session)
        saved = [copy.deepcopy(part.state_dict()) for part in parts]
        kept = torch.equal(
            weights_of(site.model), torch.cat([*map(torch.flatten, saved[0].values())])
        )
        site.steps(saved_after, 11).session.detach()
        return saved, kept, weights_of(site.model)

    done = run_on_lasting_groups(4, straight)

    def resumed(rank, group):
        site = OuterSite(method, rank, group, momentum=0.9)
        saved = done[rank][0]
        site.model.load_state_dict(saved[0])
        site.optimizer.load_state_dict(saved[1])
        site.session.load_state_dict(saved[2])
        site.steps(saved_after, 11)
        took_part = site.session.stats().took_part
        site.session.detach()
        return took_part, weights_of(site.model)

    for rank, (took_part, found) in enumerate(run_on_lasting_groups(4, resumed)):
        assert done[rank][1]
        assert torch.equal(found, done[rank][2])
        assert took_part == tuple(f"site {n}" for n in sorted(((rank - 1) % 4, (rank + 1) % 4)))


def test_a_save_changes_nothing_while_letters_travel():
    def body(rank, group, saves):
        site = OuterSite(og.Gossip("ring", every=3, overlap=2, momentum=0.5), rank, group).steps(
            0, 4
        )
        if saves:
            site.session.state_dict()
        site.steps(4, 9).session.detach()
        return weights_of(site.model)

    with_save, without = (
        run_on_lasting_groups(4, lambda rank, group, saves=saves: body(rank, group, saves))
        for saves in (True, False)
    )
    for one, other in zip(with_save, without, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", METHODS)
def test_sites_make_steps_while_letters_travel(name):
    """Site 1 begins its exchange only when site 0 is a step behind its own; nobody waits."""
    go = threading.Event()

    def body(rank, group):
        method = og.Gossip("ring", METHODS[name], every=2, overlap=2)
        site = OuterSite(method, rank, group, timeout=10.0).steps(0, 1)
        if rank == 1:
            assert go.wait(8)
        site.steps(1, 3)  # of which the first sends letters
        told = site.session.stats().took_part
        if rank == 0:
            go.set()
        site.steps(3, 4)
        after = site.session.stats().took_part
        site.session.detach()
        return told, after

    results = run_ranks(2, body)
    assert results == [((), ("site 1",)), ((), ("site 0",))]


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("name", METHODS)
def test_what_comes_late_counts_with_all_its_momentum_at_both_ends(name, overlap):
    """Rates are 0, so what moves the mean of the invariants could only be letters."""
    sites, momentum = 4, 0.5
    met = threading.Barrier(sites, timeout=20)

    def body(rank, group):
        settings = {"every": 2, "overlap": overlap, "momentum": momentum}
        site = OuterSite(
            og.Gossip("ring", METHODS[name], **settings), rank, group, lr=0.0, timeout=20.0
        )
        site.differ()
        site.steps(0, 2)
        first = site.invariant(momentum)
        if rank in (1, 3):  # site 0 waits for those that wait
            site.be_patient(1.5)
        for number in range(2, 6):
            if rank == 2 and number == 3:
                met.wait()
            site.steps(number, number + 1)
        took_part = site.session.stats().took_part
        if rank != 2:
            met.wait()
        site.be_patient(20.0)
        site.steps(6, 8).session.state_dict()
        site.session._updates._finish()
        last = site.invariant(momentum)
        site.session.detach()
        return first, took_part, last

    results = run_ranks(sites, body)
    assert results[1][1] == ("site 0",)
    first, last = (sum(r[k] for r in results) / sites for k in (0, 2))
    torch.testing.assert_close(last, first, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rounds", [None, 40])
@pytest.mark.parametrize("overlap", [0, 1])
def test_sites_that_were_averaged_stay_near_their_mean_and_keep_its_momentum(rounds, overlap):
    settings = {"every": 2, "overlap": overlap, "lr": 0.7, "momentum": 0.9}

    def body(rank, group):
        site = OuterSite(og.Gossip("ring", **settings), rank, group).steps(0, 6)
        site.session.average(rounds)
        averaged, change = weights_of(site.model), site.change_alone(6, 8)
        last = flat(site.session._updates._outer._last)
        site.steps(6, 8).session.average()
        after = weights_of(site.model)
        site.session.detach()
        return averaged, change, last, after

    results = run_on_lasting_groups(4, body)
    averaged, change, last, after = (sum(parts) / 4 for parts in zip(*results, strict=True))
    y = averaged + 0.7 * change
    torch.testing.assert_close(after, y + 0.9 * (y - last), rtol=0, atol=1e-13)
    for one, _, _, end in results:
        torch.testing.assert_close(one, averaged, rtol=0, atol=1e-6 if rounds else 1e-14)
        torch.testing.assert_close(end, after, rtol=0, atol=1e-14)


def test_what_travels_when_a_session_ends_still_counts():
    def body(rank, group):
        site = OuterSite(og.Gossip("complete", every=2, overlap=2), rank, group, lr=0.0)
        before = flat(site.differ())
        site.steps(0, 2)
        between = weights_of(site.model)
        site.session.detach()
        return before, between, weights_of(site.model)

    results = run_on_lasting_groups(3, body)
    mean = sum(before for before, *_ in results) / 3
    for before, between, after in results:
        assert torch.equal(between, before)
        torch.testing.assert_close(after, mean, rtol=0, atol=1e-14)


def test_without_a_rate_and_momentum_no_weights_are_kept():
    def body(rank, group):
        site = OuterSite(og.Gossip("ring", every=2), rank, group).steps(0, 3)
        state = site.session.state_dict()["gossip"]
        site.session.detach()
        return state["outer"], state["part"]["now"]

    assert run_on_lasting_groups(2, body) == [({"start": [], "last": []}, None)] * 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 0}, "lr=0; use a number above 0"),
        ({"lr": True}, "lr=True; use a number above 0"),
        ({"momentum": 1.0}, "momentum=1.0; use a number, 0 or more and less than 1"),
        ({"every": 3, "overlap": 4}, "overlap=4; use a whole number from 0 to every=3"),
        ({"every": 3, "overlap": True}, "overlap=True; use a whole number from 0 to every=3"),
        ({"overlap": 1, "rounds": 2}, "overlap=1 does not go with rounds=2"),
    ],
)
def test_settings_that_cannot_be(settings, told):
    with pytest.raises(ValueError, match=told):
        og.Gossip("ring", **settings)
