"""Gossip around a hub: the same weights as over gloo, and nobody waits for a site that is lost."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_gossip import METHODS, Site, flat, reference, spread

import outergrad as og
from stars import Proxy, group_on, hub, on_star, star


def over_star(rank, one):
    return {"transport": one}


def over_group(rank, one):
    return {"group": group_on(one)}


WAYS = {
    "star": (over_star, {}),
    "blind star": (over_star, {"blind": True}),
    "group": (over_group, {}),
}


@pytest.fixture(params=WAYS)
def run(request):
    """Runs body(rank, way) on every site, where `way` is of `og.distribute`."""
    way, settings = WAYS[request.param]

    def on_all(sites, body):
        return on_star(sites, lambda rank, one: body(rank, way(rank, one)), settings)

    return on_all


def site_of(method, rank, way, **settings):
    """A site of `test_gossip` over another transport."""
    return Site(method, rank, **{"group": None, **way}, **settings)


def test_whole_weights_are_mixed_by_the_matrix_of_the_graph(run):
    expected = reference("ring", 4, 5)

    def body(rank, way):
        site = site_of(og.Gossip("ring"), rank, way).steps(0, 5)
        stats = site.session.stats()
        site.session.detach()
        return site.weights(), stats.took_part

    for found, wanted in zip(run(4, body), expected, strict=True):
        for x, y in zip(found[0], wanted.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-13)
        assert len(found[1]) == 2
        assert all(name.startswith("site-") for name in found[1])


@pytest.mark.parametrize("name", ["power", "choco, largest"])
def test_exchanges_keep_the_mean_and_an_average_gives_it_to_all(run, name):
    def body(rank, way):
        site = site_of(og.Gossip("exponential", METHODS[name]), rank, way, lr=0.0)
        before, after = site.differ(), site.steps(0, 8).weights()
        site.session.average(rounds=30)
        nearly = site.weights()
        site.session.average()
        end = site.weights()
        site.session.detach()
        return before, after, nearly, end

    results = run(3, body)
    mean = sum(flat(before) for before, *_ in results) / 3
    for number in (1, 2):
        found = sum(flat(one[number]) for one in results) / 3
        torch.testing.assert_close(found, mean, rtol=0, atol=1e-14)
    first, last = spread([one[0] for one in results]), spread([one[2] for one in results])
    assert last < 1e-5 * first
    for *_, end in results:
        torch.testing.assert_close(flat(end), mean, rtol=0, atol=1e-8)


def test_sites_of_a_group_of_some_gossip_among_themselves():
    """The ranks of the group are not those of the run."""
    expected = reference("ring", 2, 4)

    def body(rank, one):
        if not rank:
            return one.connected(20.0) and None
        way = {"group": group_on(one, name="some", ranks=[1, 2])}
        site = site_of(og.Gossip("ring"), rank - 1, way).steps(0, 4)
        site.session.detach()
        return site.weights()

    for found, wanted in zip(on_star(3, body)[1:], expected, strict=True):
        for x, y in zip(found, wanted.parameters(), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-13)


def test_a_site_that_is_lost_is_left_out_and_the_others_keep_their_mean(caplog):
    """Its line is cut for good; what it had said to one of them may have been lost."""
    with hub(4, grace_s=0.4) as server, caplog.at_level(logging.WARNING, "outergrad"):
        proxy = Proxy(server.port)
        stars = [star(server, rank, proxy.port if rank == 3 else None) for rank in range(4)]

        def body(rank, one):
            site = site_of(og.Gossip("ring"), rank, {"transport": one}, lr=0.0, timeout=5)
            site.differ()
            site.steps(0, 3)
            if rank == 3:
                proxy.is_up = False
                proxy.cut()
                site.steps(3, 5)
                return None
            site.steps(3, 12)
            before = site.weights()
            site.session.average(rounds=60)
            return before, site.weights(), site.session.stats().took_part

        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(body, range(4), stars))[:3]
        proxy.is_up = True
        for one in stars:
            one.close()
        proxy.close()
    mean = sum(flat(before) for before, *_ in results) / 3
    for _, after, _ in results:
        torch.testing.assert_close(flat(after), mean, rtol=0, atol=1e-10)
    assert [part for *_, part in results] == [("site-b",), ("site-a", "site-c"), ("site-b",)]
    told = [record.getMessage() for record in caplog.records]
    for name in ("site-a", "site-c"):
        assert any(one.startswith(f"{name} goes on without site-d: it is gone: ") for one in told)


def test_going_on_of_the_star_itself_is_refused():
    def body(rank, one):
        with pytest.raises(ValueError, match=r"leave when_lost='go on' of og\.Star out"):
            og.distribute(torch.nn.Linear(2, 2), og.Gossip("ring"), transport=one)

    on_star(2, body, {"when_lost": "go on"})


def test_sites_that_have_lost_the_hub_go_on_by_themselves_and_say_so(caplog):
    with hub(2) as server, caplog.at_level(logging.WARNING, "outergrad"):
        stars = [star(server, rank) for rank in range(2)]

        def body(rank, one):
            site = site_of(og.Gossip("ring"), rank, {"transport": one}, timeout=1).steps(0, 2)
            together.wait()
            if rank == 0:
                server.stop()
            together.wait()
            site.steps(2, 5)
            before = site.weights()
            assert one._line.line.wait_for(lambda: False, 20.0) is False  # until it has failed
            site.steps(5, 8)
            site.session.detach()
            return site.session.stats().took_part, not torch.equal(
                flat(before), flat(site.weights())
            )

        together = threading.Barrier(2)
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(body, range(2), stars)) == [((), True)] * 2
        for one in stars:
            one.close()
    told = [record.getMessage() for record in caplog.records]
    for name, other in (("site-a", "site-b"), ("site-b", "site-a")):
        assert any(one.startswith(f"{name} goes on without {other}: ") for one in told)
