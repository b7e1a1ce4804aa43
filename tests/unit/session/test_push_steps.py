"""Push-sum over directed graphs: both sums are kept, whoever is late, and their ratio is shown."""

from __future__ import annotations

import copy
import time
from collections import deque

import pytest
import torch
from torch.optim import SGD

import outergrad as og
from cases import Events
from covering import covering
from gossip_sites import Late, Site, flat
from outergrad.core.sites import sites_of
from outergrad.core.transport import Letter
from outergrad.gossip import (
    EdgeList,
    Exponential,
    Lossy,
    RandomK,
    Ring,
    SparsePush,
    mixing_matrix,
    push_weights,
)
from outergrad.gossip.push import LEAST_MASS
from outergrad.session.push_rounds import MOST_ON_THEIR_WAY, PushLine
from ranks import run_on_lasting_groups, run_ranks
from sites_apart import model, train

RING = Ring(directed=True)
UNEVEN = EdgeList(((0, 1), (0, 2), (1, 2), (2, 3), (3, 0)), directed=True)
GRAPHS = {
    "ring": RING,
    "exponential": Exponential(directed=True),
    "uneven": UNEVEN,
    "lossy ring": Lossy(RING, share=0.2, seed=5),
    "lossy exponential": Lossy(Exponential(directed=True), share=0.2, seed=5),
}
METHODS = {
    "whole": None,
    "largest": SparsePush(reduce=og.wire.TopK(0.2), gamma=0.1),
    "random": SparsePush(reduce=RandomK(0.2), gamma=0.1),
    "signs": SparsePush(reduce=og.wire.Sign(), gamma=0.1),
}
OFTEN = {"1": {}, "2": {"every": 2}, "1, twice": {"rounds": 2}}
SITES = 4


def part(site):
    """What a site has of both sums: x, with the origin counted by its mass, and the mass."""
    found = site.session._updates._part.sum
    origins = [origin * found.mass for origin in found._own.origin]
    return flat([x + y for x, y in zip(found.x, origins, strict=True)]), found.mass


def hasten(site):
    """Lets a site wait for others for a short time alone."""
    site.session._updates._at.comm.patience_s = 0.5


def sums(parts):
    return sum(x for x, _ in parts), sum(mass for _, mass in parts)


def reference(graph, steps, every=1, rounds=1):
    """x and w times the mixing matrix, in one process: the weights x / w after the last round."""
    replicas = [model().double() for _ in range(SITES)]
    x = torch.stack([flat([p.detach() for p in net.parameters()]) for net in replicas])
    mass = torch.ones(SITES, dtype=torch.float64)
    for number in range(steps):
        shown = [flat([p.detach() for p in net.parameters()]).clone() for net in replicas]
        for rank, net in enumerate(replicas):
            train(net, [SGD(net.parameters(), lr=0.1)], rank, [number])
        now = [flat([p.detach() for p in net.parameters()]) for net in replicas]
        x = x + torch.stack(now) - torch.stack(shown)
        for index in range(rounds if (number + 1) % every == 0 else 0):
            edges = graph.edges(SITES, number // every * rounds + index)
            mixing = mixing_matrix(push_weights(edges), SITES, directed=True)
            assert (mixing.diagonal() * mass >= LEAST_MASS).all()  # else a site gives nothing
            x, mass = mixing @ x, mixing @ mass
        if (number + 1) % every == 0:
            for net, weights in zip(replicas, x / mass[:, None], strict=True):
                torch.nn.utils.vector_to_parameters(weights, net.parameters())
    return [[p.detach() for p in net.parameters()] for net in replicas], mass


@pytest.mark.parametrize(("graph", "often"), covering(list(GRAPHS), list(OFTEN), quick=3))
def test_whole_weights_are_mixed_by_the_matrix_of_the_graph(graph, often):
    expected, mass = reference(GRAPHS[graph], 6, **OFTEN[often])

    def body(rank, group):
        site = Site(og.Gossip(GRAPHS[graph], **OFTEN[often]), rank, group).steps(0, 6)
        site.session.detach()
        return site.weights(), part(site)[1]

    for rank, (found, own) in enumerate(run_on_lasting_groups(SITES, body)):
        torch.testing.assert_close(flat(found), flat(expected[rank]), rtol=0, atol=1e-12)
        assert own == pytest.approx(float(mass[rank]), abs=1e-13)


@pytest.mark.parametrize(("name", "graph"), covering(list(METHODS), list(GRAPHS), quick=4))
def test_rounds_keep_both_sums(name, graph):
    """With a rate of 0: what then moves a site is its neighbours alone."""

    def body(rank, group):
        site = Site(og.Gossip(GRAPHS[graph], METHODS[name]), rank, group, lr=0.0)
        before = site.differ()
        after = [part(site.steps(n, n + 1)) for n in range(10)]
        shown = flat(site.weights())
        site.session.detach()
        return flat(before), after, shown

    results = run_on_lasting_groups(SITES, body)
    first = sum(before for before, *_ in results)
    for number in range(10):
        total, mass = sums([after[number] for _, after, _ in results])
        torch.testing.assert_close(total, first, rtol=0, atol=1e-12)
        assert mass == pytest.approx(SITES, abs=1e-12)
    for _, after, shown in results:
        x, mass = after[-1]
        torch.testing.assert_close(shown, x / mass, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", METHODS)
def test_average_gives_all_sites_the_ratio_of_the_sums(name):
    def body(rank, group):
        site = Site(og.Gossip(UNEVEN, METHODS[name]), rank, group).steps(0, 5)
        before = part(site)
        site.session.average()
        once, mass = site.weights(), part(site)[1]
        site.steps(5, 7).session.flush()
        again = site.weights()
        site.session.detach()
        return before, flat(once), mass, flat(again)

    results = run_on_lasting_groups(SITES, body)
    total, mass = sums([before for before, *_ in results])
    for _, once, own, again in results:
        assert torch.equal(once, results[0][1])
        assert torch.equal(again, results[0][3])
        assert own == 1
        torch.testing.assert_close(once, total / mass, rtol=0, atol=1e-13)
    assert not torch.equal(results[0][1], results[0][3])


def test_average_by_rounds_comes_near_to_the_mean_without_an_exchange_of_all():
    def body(rank, group):
        site = Site(og.Gossip(RING, METHODS["largest"]), rank, group).steps(0, 5)
        before = part(site)
        site.session.average(rounds=80)
        after = site.weights()
        site.steps(5, 6).session.detach()
        return before, flat(after)

    results = run_on_lasting_groups(SITES, body)
    total, mass = sums([before for before, _ in results])
    for _, after in results:
        torch.testing.assert_close(after, total / mass, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "often"), covering(list(METHODS), list(OFTEN), quick=3))
def test_a_saved_training_goes_on_to_the_bit(name, often):
    method = og.Gossip(GRAPHS["lossy exponential"], METHODS[name], **OFTEN[often])

    def straight(rank, group):
        site = Site(method, rank, group, momentum=0.9).steps(0, 5)
        parts = (site.model, site.optimizer, site.session)
        saved = [copy.deepcopy(part.state_dict()) for part in parts]
        site.steps(5, 12).session.detach()
        return saved, site.weights()

    done = run_on_lasting_groups(SITES, straight)

    def resumed(rank, group):
        site = Site(method, rank, group, momentum=0.9).steps(0, 3)
        saved = done[rank][0]
        site.model.load_state_dict(saved[0])
        site.optimizer.load_state_dict(saved[1])
        site.session.load_state_dict(saved[2])
        site.steps(5, 12).session.detach()
        return site.weights()

    for (_, expected), found in zip(done, run_on_lasting_groups(SITES, resumed), strict=True):
        assert torch.equal(flat(found), flat(expected))


def test_a_training_repeats_to_the_bit_whichever_site_is_faster():
    def trained(slow):
        def body(rank, group):
            site = Site(og.Gossip(GRAPHS["lossy ring"], METHODS["largest"]), rank, group)
            for number in range(12):
                time.sleep(0.02 if rank in slow else 0.0)
                site.steps(number, number + 1)
            site.session.state_dict()
            site.steps(12, 14).session.detach()
            return site.weights()

        return run_on_lasting_groups(SITES, body)

    for one, other in zip(trained({1}), trained({0, 3}), strict=True):
        assert torch.equal(flat(one), flat(other))


@pytest.mark.parametrize("graph", ["ring", "lossy exponential"])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_on_its_way_counts_when_it_comes(name, graph):
    """Site 2 sleeps over some steps; those next to it go on, and the sums are what they were."""
    late = Late()

    def body(rank, group):
        method = og.Gossip(GRAPHS[graph], METHODS[name])
        site = Site(method, rank, group, lr=0.0)
        hasten(site)
        before, now = site.differ(), []
        for number in range(9):
            if rank == 2 and number == 2:
                late.wait()
            site.steps(number, number + 1)
            now.append(part(site))
        if rank == 1:
            late.go.set()
        site.settle()
        settled = part(site)
        site.steps(9, 12).session.average()
        end = flat(site.weights())
        site.session.detach()
        return flat(before), now, settled, end

    results = run_ranks(SITES, body)
    first = sum(before for before, *_ in results)
    total, mass = sums([settled for *_, settled, _ in results])
    torch.testing.assert_close(total, first, rtol=0, atol=1e-12)
    assert mass == pytest.approx(SITES, abs=1e-12)
    for *_, end in results:
        torch.testing.assert_close(end, first / SITES, rtol=0, atol=1e-12)


def test_a_neighbour_that_is_away_is_given_no_more_and_then_takes_all_at_once():
    """Site 0 pushes to site 1 alone, which sleeps: it keeps its weights after a few pushes."""
    late = Late()
    graph = EdgeList(((0, 1), (1, 2), (2, 0)), directed=True)

    def body(rank, group):
        site = Site(og.Gossip(graph), rank, group, lr=0.0)
        hasten(site)
        site.differ()
        took_part, masses = [], []
        for number in range(12):
            if rank == 1 and number == 0:
                late.wait()
            if number == 8 and rank == 0:
                late.go.set()
            if number >= 8:
                time.sleep(0.1)  # time enough to hear each other
            site.steps(number, number + 1)
            took_part.append(site.session.stats().took_part)
            masses.append(part(site)[1])
        site.settle()
        settled = part(site)
        site.session.detach()
        return took_part, masses, settled

    (heard, masses, _), _, _ = results = run_ranks(3, body)
    assert masses[5] == masses[6] == masses[7]
    assert heard[7] == ("site 2",)
    assert sums([settled for *_, settled in results])[1] == pytest.approx(3, abs=1e-12)


def test_a_state_that_is_loaded_forgets_what_was_on_its_way():
    """Site 1 sleeps over two pushes, and both load what was before them."""
    late = Late()

    def body(rank, group):
        site = Site(og.Gossip(RING), rank, group, lr=0.0)
        before, model_then = site.differ(), copy.deepcopy(site.model.state_dict())
        site.settle()
        saved = site.session.state_dict()
        hasten(site)
        if rank == 1:
            late.wait()
        site.steps(0, 2)
        late.go.set()
        site.model.load_state_dict(model_then)
        site.session._updates._at.comm.patience_s = 10.0
        site.session.load_state_dict(saved)
        loaded, held = site.weights(), part(site)[1]
        after = flat(site.steps(2, 3).weights())
        site.session.detach()
        return flat(before), flat(loaded), held, after

    results = run_ranks(2, body)
    mean = sum(before for before, *_ in results) / 2
    for before, loaded, mass, after in results:
        assert torch.equal(loaded, before)
        assert mass == 1
        torch.testing.assert_close(after, mean, rtol=0, atol=1e-13)


def test_a_neighbour_that_ends_leaves_the_others_a_least_mass_and_keeps_nobody_waiting():
    """Of a ring a chain is left: its first site gets nothing any more, and then gives nothing."""

    def body(rank, group):
        site = Site(og.Gossip(RING), rank, group, lr=0.0)
        site.differ()
        site.steps(0, 2)
        if rank == 3:
            site.session.release()
            return 0.0, (), 0.0
        began = time.monotonic()
        site.steps(2, 30)
        took_s = time.monotonic() - began
        found = part(site)[1], site.session.stats().took_part, took_s
        site.session.release()
        return found

    (first, nobody, _), *others, _ = run_ranks(SITES, body)
    assert nobody == ()
    assert first >= LEAST_MASS
    assert [took_part for _, took_part, _ in others] == [("site 0",), ("site 1",)]
    assert all(mass >= LEAST_MASS and took_s < 15 for mass, _, took_s in others)


@pytest.mark.parametrize("name", METHODS)
def test_weights_that_are_not_finite_stay_at_their_site(name):
    def body(rank, group):
        site = Site(og.Gossip(RING, METHODS[name]), rank, group).steps(0, 1)
        if rank == 1:
            with torch.no_grad():
                site.model[0].weight[2, 3] = float("nan")
        site.steps(1, 4)
        finite = bool(flat(site.weights()).isfinite().all())
        site.session.detach()
        return finite

    assert run_on_lasting_groups(SITES, body) == [True, False, True, True]


def test_who_was_heard_and_the_mass_are_recorded():
    def body(rank, group):
        events = Events()
        site = Site(og.Gossip(UNEVEN), rank, group, recorder=events).steps(0, 3)
        mass, coverage = part(site)[1], site.session.coverage()
        site.settle()  # no site is told of an end before it has sent all
        site.session.detach()
        return events, mass, coverage

    to = ["sites 1, 2", "site 2", "site 3", "site 0"]
    of = [("site 3",), ("site 0",), ("site 0", "site 1"), ("site 2",)]
    for rank, (events, mass, coverage) in enumerate(run_on_lasting_groups(SITES, body)):
        exchanges = [event for event in events if isinstance(event, og.events.Exchange)]
        assert [one.took_part for one in exchanges] == [of[rank]] * 3
        assert [one.late for one in exchanges] == [()] * 3
        told = [event.values for event in events if isinstance(event, og.events.Scalars)]
        assert told[-1] == {"push_mass": mass}
        steps = [event for event in events if isinstance(event, og.events.Step)]
        size = sum(8 * p.numel() for p in model().parameters())
        outs = 2 if rank == 0 else 1
        assert [one.sent_bytes for one in steps] == [
            outs * (size + 24 + 56) + 56 * len(of[rank])
        ] * 3
        assert {line.travels for line in coverage} == {"dense"}
        assert {line.reveals for line in coverage} == {f"this site's weights, to {to[rank]}"}


def test_a_graph_that_does_not_come_back_is_refused_on_all_sites():
    graph = Lossy(EdgeList(((0, 1), (1, 2)), directed=True), share=0.1)

    def body(rank, group):
        with pytest.raises(ValueError, match="does not connect rank 1 and rank 0 of 3 sites both"):
            og.distribute(model(), og.Gossip(graph), group=group)

    run_on_lasting_groups(3, body)


def test_a_single_site_trains_by_itself():
    def body(rank, group):
        site = Site(og.Gossip(RING, METHODS["largest"]), rank, group).steps(0, 3)
        site.session.average()
        site.session.detach()
        return site.weights()

    alone = model().double()
    train(alone, [SGD(alone.parameters(), lr=0.1)], 0, range(3))
    (found,) = run_on_lasting_groups(1, body)
    torch.testing.assert_close(flat(found), flat([p.detach() for p in alone.parameters()]))


class Said:
    """Lines on which a neighbour has said some letters."""

    def __init__(self, *letters):
        self.letters, self.sent = deque(letters), []

    def send(self, site, letter):
        self.sent.append(letter)

    def next(self, site, until):
        return self.letters.popleft() if self.letters else None

    def why_closed(self, site):
        return ""

    def close(self):
        pass


def push(number):
    return Letter(number, 0.5, torch.ones(3, dtype=torch.uint8))


ANSWER = Letter(0, 0.0, torch.empty(0, dtype=torch.uint8))
MARK = ANSWER._replace(number=5, ends=True)


def line(*letters):
    lines = Said(*letters)
    return PushLine(sites_of(2, ())[1], lines), lines


def test_a_round_takes_one_push_and_answers_it():
    one, lines = line(push(1), push(2))
    assert [letter.number for letter in one.pushed(1.0)] == [1]
    assert [(letter.number, len(letter.content)) for letter in lines.sent] == [(0, 0)]
    assert [letter.number for letter in one.pushed(1.0)] == [2]
    assert one.pushed(1.0) == []


def test_where_pushes_were_left_out_a_round_takes_all_that_are_there():
    one, lines = line(push(1), push(4), push(5))
    assert [letter.number for letter in one.pushed(1.0)] == [1]
    assert [letter.number for letter in one.pushed(1.0)] == [4, 5]
    assert len(lines.sent) == 3


def test_no_more_is_given_than_a_neighbour_takes():
    one, lines = line()
    for _ in range(MOST_ON_THEIR_WAY):
        assert one.has_room(1.0)
        one.push(torch.ones(3, dtype=torch.uint8), 0.5)
    assert not one.has_room(1.0)
    assert not one.has_room(1.0)
    lines.letters.append(ANSWER)
    assert one.has_room(1.0)
    one.push(torch.ones(3, dtype=torch.uint8), 0.5)
    assert [letter.number for letter in lines.sent] == [1, 2, 3, 6]


def test_what_comes_behind_a_mark_waits_until_this_site_has_settled():
    one, _ = line(push(4), MARK, push(6))
    assert [letter.number for letter in one.pushed(1.0)] == [4]
    assert one.pushed(1.0) == one.pushed(1.0) == []
    one.mark()
    assert one.pushed_before_mark(1.0) == []
    assert one.is_settled
    assert [letter.number for letter in one.pushed(1.0)] == [6]


def test_what_came_before_a_late_mark_is_dropped_where_a_state_was_loaded():
    one, lines = line(push(4))
    one.mark(forget=True)
    assert one.pushed_before_mark(1.0) == []
    assert not one.is_settled
    lines.letters.extend([push(5), MARK, push(6)])
    assert [letter.number for letter in one.pushed(1.0)] == [6]
    assert one.is_settled


@pytest.mark.parametrize("letters", [[ANSWER], [push(n) for n in range(1, 6)]])
def test_nothing_more_is_read_of_one_that_breaks_the_rules(letters):
    one, _ = line(*letters, push(9))
    for _ in range(MOST_ON_THEIR_WAY):
        one.has_room(1.0)
        one.push(torch.ones(3, dtype=torch.uint8), 0.5)
    if letters == [ANSWER]:
        one._on_their_way = 0
    one.mark()
    one.pushed_before_mark(1.0)
    assert one.why_closed == "it answers more, or says more, than it was given"
    assert not one.has_room(1.0)
    assert one.pushed(1.0) == []
