"""Gossip: sites train by themselves and average with their neighbours; the mean is kept."""

from __future__ import annotations

import copy
import logging
import math
from itertools import pairwise

import pytest
import torch
from torch.optim import SGD

import outergrad as og
from cases import Events
from covering import covering
from gossip_sites import Late, Site, flat
from outergrad.gossip import (
    Choco,
    LowRank,
    PowerGossip,
    RandomK,
    Ring,
    SparsePush,
    metropolis,
    mixing_matrix,
)
from outergrad.gossip.graphs import NAMED
from ranks import run_on_lasting_groups, run_ranks
from sites_apart import batch, loss, model, train

METHODS = {
    "whole": None,
    "power": PowerGossip(),
    "power, cold": PowerGossip(rank=2, warm=False),
    "choco, largest": Choco(reduce=og.wire.TopK(0.2), gamma=0.2),
    "choco, random": Choco(reduce=RandomK(0.2), gamma=0.1),
    "choco, signs": Choco(reduce=og.wire.Sign(), gamma=0.2),
    "choco, low rank": Choco(reduce=LowRank(1), gamma=0.2),
}
OFTEN = {"1": {}, "2": {"every": 2}, "1, twice": {"rounds": 2}}


def spread(sites):
    """Root mean square of the sites' distances from their mean."""
    stacked = torch.stack([flat(weights) for weights in sites])
    return float((stacked - stacked.mean(dim=0)).square().sum(dim=1).mean().sqrt())


def reference(graph, sites, steps, every=1, rounds=1):
    """Whole weights times the mixing matrix, in one process."""
    replicas = [model().double() for _ in range(sites)]
    optimizers = [SGD(net.parameters(), lr=0.1) for net in replicas]
    for number in range(steps):
        for rank, net in enumerate(replicas):
            train(net, [optimizers[rank]], rank, [number])
        for index in range(rounds if (number + 1) % every == 0 else 0):
            step = number // every * rounds + index
            mixing = mixing_matrix(metropolis(NAMED[graph].edges(sites, step)), sites)
            for same in zip(*(net.parameters() for net in replicas), strict=True):
                mixed = torch.einsum("ij,j...->i...", mixing, torch.stack([*same]).detach())
                for p, value in zip(same, mixed, strict=True):
                    p.data.copy_(value)
    return replicas


@pytest.mark.parametrize(
    ("graph", "sites", "often"),
    covering(list(NAMED), [1, 2, 4, 6], list(OFTEN), quick=8),
)
def test_whole_weights_are_mixed_by_the_matrix_of_the_graph(graph, sites, often):
    if graph == "torus" and sites < 4:
        pytest.skip("no torus of so few sites")
    expected = reference(graph, sites, 6, **OFTEN[often])

    def body(rank, group):
        site = Site(og.Gossip(graph, **OFTEN[often]), rank, group).steps(0, 6)
        site.session.detach()
        return site.weights()

    for found, wanted in zip(run_on_lasting_groups(sites, body), expected, strict=True):
        for x, y in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "graph", "often"), covering(list(METHODS), list(NAMED), list(OFTEN), quick=10)
)
def test_exchanges_keep_the_mean_of_all_sites(name, graph, often):
    """With a rate of 0 after the first step: what then moves a site is its neighbours alone."""
    sites = 4

    def body(rank, group):
        site = Site(og.Gossip(graph, METHODS[name], **OFTEN[often]), rank, group, lr=0.0)
        before = site.differ()
        after = [site.steps(n, n + 1).weights() for n in range(10)]
        site.session.detach()
        return before, after

    results = run_on_lasting_groups(sites, body)
    first = sum(flat(before) for before, _ in results) / sites
    for number in range(10):
        mean = sum(flat(after[number]) for _, after in results) / sites
        torch.testing.assert_close(mean, first, rtol=0, atol=1e-14)
    assert spread([after[-1] for _, after in results]) < spread([b for b, _ in results])


@pytest.mark.parametrize("name", METHODS)
def test_clipped_exchanges_keep_the_mean_and_bound_how_far_a_neighbour_moves_a_site(name):
    """Site 0 says weights that are far from all others; a ring of four has edges of weight 1/3."""
    sites, clip, gamma = 4, 0.5, getattr(METHODS[name], "gamma", 1.0)

    def body(rank, group):
        site = Site(og.Gossip("ring", METHODS[name], clip=clip), rank, group, lr=0.0)
        before = site.differ()
        if rank == 0:
            with torch.no_grad():
                for p in site.model.parameters():
                    p.mul_(1e3)
            before = site.weights()
        after = [site.steps(n, n + 1).weights() for n in range(6)]
        site.session.detach()
        return before, after

    results = run_on_lasting_groups(sites, body)
    first = sum(flat(before) for before, _ in results) / sites
    mean = sum(flat(after[-1]) for _, after in results) / sites
    torch.testing.assert_close(mean, first, rtol=1e-12, atol=0)
    for before, after in results:
        path = [flat(before), *map(flat, after)]
        moves = [float((new - old).norm()) for old, new in pairwise(path)]
        assert max(moves) <= 2 * gamma * clip / 3 * (1 + 1e-9)


def test_a_clip_that_nobody_reaches_changes_nothing():
    def weights(**settings):
        def body(rank, group):
            site = Site(og.Gossip("ring", **settings), rank, group)
            site.differ()
            found = site.steps(0, 5).weights()
            site.session.detach()
            return found

        return run_on_lasting_groups(4, body)

    for clipped, free in zip(weights(clip=1e9), weights(), strict=True):
        assert all(map(torch.equal, clipped, free))


def test_a_neighbour_that_is_clipped_is_named_once(caplog):
    def body(rank, group):
        site = Site(og.Gossip("complete", clip=1e-3), rank, group, lr=0.0)
        site.differ()
        site.steps(0, 3).session.detach()

    with caplog.at_level(logging.WARNING, "outergrad"):
        run_on_lasting_groups(2, body)
    told = sorted(r.getMessage() for r in caplog.records if "which counts as clip" in r.message)
    assert len(told) == 2
    assert told[0].startswith("site 0 is ")
    assert told[0].endswith("away from site 1, which counts as clip=0.001")


def test_weights_that_are_not_finite_are_told_of_once(caplog):
    def body(rank, group):
        site = Site(og.Gossip("complete"), rank, group, lr=0.0)
        if rank:
            with torch.no_grad():
                next(site.model.parameters()).fill_(math.nan)
        site.steps(0, 4)
        found = site.weights()
        site.session.detach()
        return found

    with caplog.at_level(logging.WARNING, "outergrad"):
        healthy, _ = run_on_lasting_groups(2, body)
    assert flat(healthy).isfinite().all()
    assert len([r for r in caplog.records if "has weights that are not finite" in r.message]) == 2


@pytest.mark.parametrize("name", METHODS)
def test_average_gives_all_sites_the_same_mean(name):
    sites = 4

    def body(rank, group):
        site = Site(og.Gossip("ring", METHODS[name]), rank, group).steps(0, 5)
        before = site.weights()
        site.session.average()
        once = site.weights()
        site.steps(5, 7).session.flush()
        again = site.weights()
        site.session.detach()
        return before, once, again

    results = run_on_lasting_groups(sites, body)
    mean = sum(flat(before) for before, _, _ in results) / sites
    for _, once, again in results:
        assert torch.equal(flat(once), flat(results[0][1]))
        assert torch.equal(flat(again), flat(results[0][2]))
        torch.testing.assert_close(flat(once), mean, rtol=0, atol=1e-14)
    assert not torch.equal(flat(results[0][1]), flat(results[0][2]))


@pytest.mark.parametrize("name", ["power", "choco, largest"])
def test_average_by_rounds_comes_near_to_the_mean_without_an_exchange_of_all(name):
    sites = 4

    def body(rank, group):
        site = Site(og.Gossip("ring", METHODS[name]), rank, group).steps(0, 5)
        before = site.weights()
        site.session.average(rounds=60)
        after = site.weights()
        site.steps(5, 6).session.detach()
        return before, after

    results = run_on_lasting_groups(sites, body)
    mean = sum(flat(before) for before, _ in results) / sites
    for before, after in results:
        torch.testing.assert_close(flat(after), mean, rtol=0, atol=1e-13)
        assert (flat(before) - mean).norm() > 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_training_goes_on_to_the_bit(name):
    method = og.Gossip("random", METHODS[name], every=2)

    def straight(rank, group):
        site = Site(method, rank, group, momentum=0.9).steps(0, 5)
        parts = (site.model, site.optimizer, site.session)
        saved = [copy.deepcopy(part.state_dict()) for part in parts]
        site.steps(5, 12).session.detach()
        return saved, site.weights()

    done = run_on_lasting_groups(4, straight)

    def resumed(rank, group):
        site = Site(method, rank, group, momentum=0.9)
        saved = done[rank][0]
        site.model.load_state_dict(saved[0])
        site.optimizer.load_state_dict(saved[1])
        site.session.load_state_dict(saved[2])
        site.steps(5, 12).session.detach()
        return site.weights()

    for (_, expected), found in zip(done, run_on_lasting_groups(4, resumed), strict=True):
        assert torch.equal(flat(found), flat(expected))


@pytest.mark.parametrize("name", METHODS)
def test_a_late_neighbour_keeps_nobody_waiting_and_what_it_missed_still_counts(name):
    """Sites have a rate of 0, so that their mean should stay; site 2 sleeps over some steps."""
    sites, late = 4, Late()

    def body(rank, group):
        method = og.Gossip("ring", METHODS[name])
        site = Site(method, rank, group, lr=0.0, timeout=1.0)
        before, took_part = site.differ(), []
        if rank == 0:  # which waits for those that wait
            site.session._updates._at.comm.patience_s = 10.0
        for number in range(3):
            if rank == 2 and number == 1:
                late.wait()
            site.steps(number, number + 1)
            took_part.append(site.session.stats().took_part)
        if rank == 0:
            late.go.set()
        site.settle()
        settled = site.weights()
        site.steps(3, 6).session.average()
        end = site.weights()
        site.session.detach()
        return before, took_part, settled, end

    results = run_ranks(sites, body)
    first = sum(flat(before) for before, *_ in results) / sites
    settled = sum(flat(weights) for _, _, weights, _ in results) / sites
    torch.testing.assert_close(settled, first, rtol=0, atol=1e-14)
    assert results[1][1] == [("site 0", "site 2"), ("site 0",), ("site 0",)]
    assert results[0][1] == [("site 1", "site 3")] * 3
    for *_, end in results:
        torch.testing.assert_close(flat(end), first, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["whole", "choco, largest"])
def test_a_site_that_saves_later_than_its_neighbours_is_met_again(name):
    """Until both have settled no round begins, so that the mean stays; then all go on."""
    sites, late = 3, Late()

    def body(rank, group):
        method = og.Gossip("complete", METHODS[name])
        site = Site(method, rank, group, lr=0.0, timeout=1.0)
        before = site.differ()
        site.steps(0, 2)
        if rank == 2:
            late.wait()
        unsettled = site.session.state_dict()["gossip"]["unsettled"]
        apart = site.steps(2, 3).session.stats().took_part
        if rank == 0:
            late.go.set()
        site.settle()
        site.steps(3, 5)
        again, after = site.session.stats().took_part, site.weights()
        site.session.detach()
        return before, unsettled, apart, again, after

    results = run_ranks(sites, body)
    assert [unsettled for _, unsettled, *_ in results[:2]] == [[2], [2]]
    assert [apart for _, _, apart, *_ in results[:2]] == [("site 1",), ("site 0",)]
    near = [("site 1", "site 2"), ("site 0", "site 2"), ("site 0", "site 1")]
    assert [again for *_, again, _ in results] == near
    first = sum(flat(before) for before, *_ in results) / sites
    torch.testing.assert_close(sum(flat(r[-1]) for r in results) / sites, first, rtol=0, atol=1e-14)


def test_a_round_under_way_is_forgotten_where_a_state_is_loaded():
    """Site 1 comes late to a round and both load what was before: site 0 never makes that move."""
    late = Late()

    def body(rank, group):
        site = Site(og.Gossip("ring"), rank, group, lr=0.0, timeout=1.0)
        before, model_then = site.differ(), copy.deepcopy(site.model.state_dict())
        saved = site.session.state_dict()
        if rank == 1:
            late.wait()
        site.steps(0, 1)  # at site 0 in vain
        late.go.set()
        site.model.load_state_dict(model_then)
        site.session._updates._at.comm.patience_s = 10.0
        site.session.load_state_dict(saved)
        loaded = site.weights()
        after = site.steps(1, 2).weights()
        site.session.detach()
        return before, loaded, after

    results = run_ranks(2, body)
    for before, loaded, after in results:
        assert torch.equal(flat(loaded), flat(before))
        mean = sum(flat(before) for before, *_ in results) / 2
        torch.testing.assert_close(flat(after), mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_not_finite_stay_at_their_site(name):
    def body(rank, group):
        site = Site(og.Gossip("ring", METHODS[name]), rank, group).steps(0, 1)
        if rank == 1:
            with torch.no_grad():
                site.model[0].weight[2, 3] = float("nan")
        site.steps(1, 4)
        finite = bool(flat(site.weights()).isfinite().all())
        site.session.detach()
        return finite

    assert run_on_lasting_groups(4, body) == [True, False, True, True]


def test_a_neighbour_that_ends_is_left_out_and_the_others_keep_their_mean():
    sites = 4

    def body(rank, group):
        site = Site(og.Gossip("ring"), rank, group, lr=0.0)
        site.differ()
        site.steps(0, 2)
        before = site.weights()
        if rank == 3:
            site.session.release()
            return before, before, ()
        site.steps(2, 40)
        took_part = site.session.stats().took_part
        after = site.weights()
        site.session.release()
        return before, after, took_part

    results = run_ranks(sites, body)[:3]
    mean = sum(flat(before) for before, _, _ in results) / 3
    for _, after, _ in results:
        torch.testing.assert_close(flat(after), mean, rtol=1e-4, atol=1e-4)
    after = sum(flat(after) for _, after, _ in results) / 3
    torch.testing.assert_close(after, mean, rtol=0, atol=1e-14)
    assert [took_part for *_, took_part in results] == [
        ("site 1",),
        ("site 0", "site 2"),
        ("site 1",),
    ]


@pytest.mark.parametrize("name", METHODS)
def test_only_public_copies_need_the_weights_of_the_start(name):
    def body(rank, group):
        site = Site(og.Gossip("ring", METHODS[name]), rank, group)
        start = site.session._updates._part._start
        site.steps(0, 1).session.detach()
        return sum(t.untyped_storage().nbytes() for t in start)

    size = sum(8 * p.numel() for p in model().parameters())
    for held in run_on_lasting_groups(2, body):
        assert held == size if name.startswith("choco") else held < size / 10


def test_who_was_heard_and_how_far_away_is_recorded():
    def body(rank, group):
        events = Events()
        site = Site(og.Gossip("ring"), rank, group, recorder=events).steps(0, 3)
        stats = site.session.stats()
        site.session.detach()
        return events, stats, site.session.coverage()

    for rank, (events, stats, coverage) in enumerate(run_on_lasting_groups(4, body)):
        near = tuple(f"site {n}" for n in sorted(((rank - 1) % 4, (rank + 1) % 4)))
        exchanges = [event for event in events if isinstance(event, og.events.Exchange)]
        assert [one.took_part for one in exchanges] == [near] * 3
        assert [one.late for one in exchanges] == [()] * 3
        told = [event.values for event in events if isinstance(event, og.events.Scalars)]
        assert told[-1] == {"neighbour_distance": stats.neighbour_distance}
        assert stats.neighbour_distance > 0
        steps = [event for event in events if isinstance(event, og.events.Step)]
        size = sum(8 * p.numel() for p in model().parameters())
        assert [one.sent_bytes for one in steps] == [2 * (size + 56)] * 3
        assert {line.travels for line in coverage} == {"dense"}
        assert all("alone" in line.why for line in coverage)
        assert all(line.reveals.startswith("this site's weights, to site") for line in coverage)


def test_the_distance_is_that_of_the_neighbours_before_the_exchange():
    def body(rank, group):
        site = Site(og.Gossip("ring"), rank, group)
        alone = copy.deepcopy(site.model)
        train(alone, [SGD(alone.parameters(), lr=0.1)], rank, [0])
        site.steps(0, 1)
        distance = site.session.stats().neighbour_distance
        site.session.detach()
        return flat([p.detach() for p in alone.parameters()]), distance

    (one, told), (other, same) = run_on_lasting_groups(2, body)
    assert told == pytest.approx(float((one - other).norm()))
    assert same == told


def test_gradients_stay_the_site_s_own():
    def body(rank, group):
        site = Site(og.Gossip("ring"), rank, group).steps(0, 1)
        alone = copy.deepcopy(site.model)
        loss(alone(batch(rank, 1, torch.float64))).backward()
        site.steps(1, 2)
        pairs = zip(site.model.parameters(), alone.parameters(), strict=True)
        equal = [torch.equal(p.grad, q.grad) for p, q in pairs]
        site.session.detach()
        return equal

    assert all(map(all, run_on_lasting_groups(2, body)))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"verify_every": 3}, "lets sites differ all the time: leave verify_every= out"),
        ({"tap": og.FileTap("sent.pt")}, "of which no tap is told: leave tap= out"),
        ({"weighting": "samples"}, "counts all sites alike"),
        ({"buffers": "mean"}, "leaves buffers to each site"),
        ({"max_bad_steps": 3}, "has no step that all sites could skip"),
    ],
)
def test_settings_that_need_all_sites_are_refused(settings, told):
    def body(rank, group):
        with pytest.raises(ValueError, match=told):
            og.distribute(model(), og.Gossip("ring"), group=group, **settings)

    run_on_lasting_groups(2, body)


def test_a_transport_without_lines_is_refused(monkeypatch):
    monkeypatch.setattr("outergrad.comm.torch.is_gloo", lambda group: False)

    def body(rank, group):
        with pytest.raises(ValueError, match="needs lines between pairs of sites"):
            og.distribute(model(), og.Gossip("ring"), group=group)

    run_on_lasting_groups(2, body)


def test_a_graph_that_does_not_fit_is_refused_on_all_sites(tmp_path):
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n")

    def body(rank, group):
        with pytest.raises(ValueError, match="the edges are of 2 sites"):
            og.distribute(model(), og.Gossip(path), group=group)

    run_on_lasting_groups(3, body)


def test_sites_with_other_graphs_are_refused():
    def body(rank, group):
        with pytest.raises(ValueError, match="the sites do not agree"):
            og.distribute(model(), og.Gossip("ring" if rank else "complete"), group=group)

    run_on_lasting_groups(2, body)


def test_what_all_sites_would_do_together_is_refused():
    def body(rank, group):
        site = Site(og.Gossip("ring"), rank, group).steps(0, 1)
        with pytest.raises(RuntimeError, match="leave the join out"), site.session.join():
            pass
        with pytest.raises(RuntimeError, match=r"call session.average\(\)"):
            site.session.make_equal()
        with pytest.raises(ValueError, match="rounds=0"):
            site.session.average(rounds=0)
        site.session.detach()
        plain = Site(og.Dense(), rank, group)
        with pytest.raises(RuntimeError, match=r"session.average\(\) is for og.Gossip"):
            plain.session.average()
        plain.session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: og.Gossip("rng"), ValueError, "is no graph and no file"),
        (lambda: og.Gossip("ring", every=0), ValueError, "every=0; use a whole number"),
        (lambda: og.Gossip("ring", rounds=1.5), ValueError, "rounds=1.5; use a whole number"),
        (lambda: og.Gossip("ring", clip=0), ValueError, "clip=0; use a number above 0"),
        (lambda: og.Gossip("ring", clip="2"), ValueError, "clip='2'; use a number above 0"),
        (lambda: og.Gossip("ring", clip=math.nan), ValueError, "clip=nan; use a number above 0"),
        (lambda: og.Gossip("ring", og.Dense()), TypeError, r"use None to send all weights"),
        (lambda: og.Gossip("ring", PowerGossip), TypeError, r"use None to send all weights"),
    ],
)
def test_settings_that_cannot_be(make, error, told):
    with pytest.raises(error, match=told):
        make()


def test_steps_without_an_optimizer_are_counted_by_hand():
    def body(rank, group):
        site = Site(og.Gossip("complete"), rank, group)
        site.differ()
        moved = site.session.stepped()
        after = site.weights()
        site.session.detach()
        return moved, after

    (one, a), (other, b) = run_on_lasting_groups(2, body)
    assert one
    assert other
    torch.testing.assert_close(flat(a), flat(b), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", METHODS)
def test_a_neighbour_whose_letter_cannot_be_read_is_left_out_for_good(name, caplog):
    """Site 0 sends nine bytes in place of what it says, with a checksum that is right."""

    def body(rank, group):
        site = Site(og.Gossip("complete", METHODS[name]), rank, group)
        if rank == 0:
            lines = site.session._updates._part._lines
            send, nine = lines.send, torch.zeros(9, dtype=torch.uint8)

            def lie(to, letter):
                is_said = letter.content.numel() > 0
                send(to, letter._replace(content=nine) if is_said else letter)

            lines.send = lie
        site.steps(0, 3)
        took_part = site.session.stats().took_part
        site.session.detach()
        return took_part

    with caplog.at_level(logging.WARNING, "outergrad"):
        _, one, two = run_ranks(3, body)
    assert (one, two) == (("site 2",), ("site 1",))
    told = [r.getMessage() for r in caplog.records if "without site 0" in r.getMessage()]
    assert sorted(told)[0].startswith("site 1 goes on without site 0: a letter of 9 bytes came")
    assert len(told) == 2


@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_whole_weights_that_meets_another_moves_nobody(name):
    """Site 1 saves a state and goes on where site 0 asks for an average by rounds."""

    def body(rank, group):
        site = Site(og.Gossip("complete", METHODS[name]), rank, group, lr=0.0)
        before = site.differ()
        if rank:
            site.session.state_dict()
            site.steps(0, 1)
        else:
            site.session.average(rounds=1)
        between = site.weights()
        end = site.steps(1, 4).weights()
        site.session.detach()
        return before, between, end

    (a, a_then, a_end), (b, b_then, b_end) = run_on_lasting_groups(2, body)
    if METHODS[name] is not None:
        assert torch.equal(flat(a), flat(a_then))
        assert torch.equal(flat(b), flat(b_then))
    sums = flat(a) + flat(b), flat(a_end) + flat(b_end)
    torch.testing.assert_close(*sums, rtol=0, atol=1e-13)
    assert (flat(a_end) - flat(b_end)).norm() < (flat(a) - flat(b)).norm()


@pytest.mark.parametrize(
    "method",
    [
        og.Gossip("ring"),
        og.Gossip("ring", every=2, overlap=1, lr=0.7, momentum=0.5),
        og.Gossip(Ring(directed=True)),
        og.Gossip(Ring(directed=True), SparsePush(reduce=RandomK(0.2), gamma=0.1)),
    ],
    ids=["whole", "outer", "pushes", "few pushes"],
)
def test_weights_that_lie_elsewhere_from_some_step_on_are_exchanged_as_before(method):
    """`model.cpu()` and back puts new memory behind every parameter."""

    def weights(moves):
        def body(rank, group):
            site = Site(method, rank, group).steps(0, 3)
            for p in site.model.parameters() if moves else ():
                p.data = p.data.clone()
            site.steps(3, 7).session.detach()
            return site.weights()

        return run_on_lasting_groups(3, body)

    for moved, kept in zip(weights(moves=True), weights(moves=False), strict=True):
        assert all(map(torch.equal, moved, kept))
