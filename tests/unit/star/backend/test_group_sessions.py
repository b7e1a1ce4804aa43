"""Sessions over a process group of all sites are those of the transport, to the bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_own_transport import METHODS, build, train

import outergrad as og
from stars import Proxy, group_on, hub, on_star, star

SITES = 3
OTHERS = {"exchanges with a quorum": og.LocalSteps(2, quorum=2, grace=5.0), "usual": None}


def trained(rank, method, after=lambda: None, **way):
    model, found = build(), []
    session = og.distribute(model, method, **way)
    for gradients in train(model, rank):
        found.append(gradients)
        after()
    told = session._at.comm.way
    session.detach()
    return found, told, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("settings", [{}, {"blind": True}], ids=["open", "blind"])
@pytest.mark.parametrize(
    "method",
    [*(METHODS[m] for m in ("dad forced", "rank-dad two ways", "rank-dad sums", "dense"))],
    ids=["dad", "two ways", "sums", "dense"],
)
def test_gradients_are_those_of_the_transport(method, settings):
    over_group = on_star(SITES, lambda r, one: trained(r, method, group=group_on(one)), settings)
    over_star = on_star(SITES, lambda r, one: trained(r, method, transport=one), settings)
    for (mine, way, _), (theirs, other, _) in zip(over_group, over_star, strict=True):
        assert way.partition(", ")[2] == other.partition(", ")[2]  # the hub has another port
        for step, expected in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, step, expected))


@pytest.mark.parametrize("method", OTHERS.values(), ids=OTHERS)
def test_other_kinds_of_sessions_begin_and_end_as_well(method):
    on_star(SITES, lambda r, one: trained(r, method, group=group_on(one)))


def two_behind_a_network(cuts):
    """Gradients of two sites; the line of one is cut after each of its steps, or never."""
    with hub(2, grace_s=10.0) as server:
        proxy = Proxy(server.port)
        stars = [star(server, 0), star(server, 1, proxy.port)]

        def body(rank, one):
            after = proxy.cut if rank and cuts else lambda: None
            return trained(rank, METHODS["dad forced"], after, group=group_on(one))[0]

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(body, range(2), stars))
        for one in stars:
            one.close()
        proxy.close()
        return found


def test_cuts_of_a_line_change_no_bit():
    cut, quiet = two_behind_a_network(True), two_behind_a_network(False)
    for mine, theirs in zip(cut, quiet, strict=True):
        for step, expected in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, step, expected))
