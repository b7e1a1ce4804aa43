"""What `outergrad plan` says of a transport that is not torch.distributed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from examples.queue_transport import Hub, QueueTransport
from torch import nn

from outergrad.comm.cost import StarCost
from outergrad.launch.links import ShapedLink
from outergrad.session.attach import distribute
from outergrad.tools.plan.forecast import Question, forecast
from outergrad.tools.plan.measure import PAIRS, WARM_UP, method_of
from outergrad.tools.plan.subject import subject

METHODS = (
    "dense",
    "dad",
    "edad",
    "rank-dad-1",
    "rank-dad:rank=1:reduce=two_way",
    "rank-dad:rank=1:reduce=all_reduce",
    "rank-dad:rank=1:reduce=alternate",
    "sparse:density=0.05",
    "og-powersgd:rank=2",
)
SITES, WIDTH = 3, 120
MODEL = f"{__name__}:small"


def small(rows):
    """As `outergrad plan --model` takes it."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    return nn.Sequential(*layers), torch.randn(rows, WIDTH)


def planned(transport, methods=METHODS, rows=4, **other):
    link = ShapedLink(rate_bit_per_s=1e7, rtt_s=0.02)
    settings = {"model": MODEL, "rows": rows, "sites": SITES, "methods": methods, "seconds": 0}
    return forecast(Question(**settings, link=link, transport=transport, **other), lambda _: None)


@pytest.fixture(scope="module")
def star():
    return planned("star")


def sent_by_sites(method):
    """Bytes of the last two of as many steps as are planned, of real sites around a hub."""
    hub = Hub(SITES)
    models = [subject(MODEL, 4) for _ in range(SITES)]

    def body(rank):
        mine, transport = models[rank], QueueTransport(hub, rank)
        session = distribute(mine.model, method_of(method), transport=transport, buffers="local")
        found = []
        for _ in range(WARM_UP + 2 * PAIRS):
            mine.model.zero_grad()
            mine.loss(mine.model).backward()
            found.append(session.stats())
        session.detach()
        return [(stats.sent_bytes, stats.received_bytes) for stats in found[-2:]]

    with ThreadPoolExecutor(SITES) as threads:
        return list(threads.map(body, range(SITES)))


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_sites_around_a_hub(star, method):
    torch.tanh(torch.ones(2))
    (plan,) = (m for m in star.methods if m.method == method)
    sent, received = map(sum, zip(*sent_by_sites(method)[0], strict=True))
    assert (plan.sent_bytes, plan.stats.received_bytes) == (sent // 2, received // 2)


def waited_s(plan):
    """The longest wait of a step of dense."""
    return plan.dense.seconds(plan.question.link).high - plan.dense.compute_s.high


def test_what_a_step_waits_for(star):
    """Dense gradients, by hand: a round trip and twice 4 bytes a parameter, on a line at once."""
    (dense,) = (m for m in star.methods if m.method == "dense")
    nbytes = 4 * (2 * WIDTH * (WIDTH + 1) + 2 * WIDTH)
    assert nbytes <= dense.sent_bytes < nbytes + 500
    assert nbytes <= dense.stats.received_bytes < nbytes + 500
    headers = 1 + 1.5 * 66 / 1448
    assert dense.wire_bytes == pytest.approx(headers * dense.sent_bytes, rel=1e-3)
    network_s = headers * dense.sent_bytes * 8 / 1e7
    assert waited_s(star) == pytest.approx(network_s + 0.02, rel=0.4)


def test_methods_choose_by_the_costs_of_the_star():
    """Rows pay that are fewer bytes than 1 / (S - 1) of the gradient; on torch.distributed 2 / S.

    The bias, O numbers, is part of the gradient and travels beside the rows.
    """
    rows = 35
    found = {name: planned(name, ("dad",), rows=rows) for name in ("torch", "star")}
    limits = {name: plan.layers[0].break_even for name, plan in found.items()}
    whole, beside, row = WIDTH * (WIDTH + 1), WIDTH, 2 * WIDTH
    assert limits["star"] == pytest.approx(2 * ((whole / (SITES - 1) - beside) / row,))
    assert limits["torch"] == pytest.approx(2 * ((whole * 2 / SITES - beside) / row,))
    marks = {name: plan.layers[0].sent["dad"].marks for name, plan in found.items()}
    assert marks == {"torch": "f", "star": ""}


def test_a_transport_of_ones_own_is_one_function():
    """The name of one, as the command takes it, or itself."""
    for transport in (StarCost, "outergrad.comm.cost:StarCost"):
        found = planned(transport, ("dad",))
        _, dad = found.methods
        assert dad.sent_bytes == planned("star", ("dad",)).methods[1].sent_bytes


def test_a_hub_with_a_thin_line_slows_all_sites(star):
    slow = planned("star", ("dense",), hub_bit_per_s=3e6)
    assert waited_s(slow) > 5 * waited_s(star)
    assert slow.as_dict()["hub_bit_per_s"] == 3e6
