"""Whole trainings on a transport that is no part of outergrad, without torch.distributed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from examples.queue_transport import Hub, QueueTransport
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import relative_error
from covering import covering
from outergrad.comm.cost import StarCost
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.types import Link
from outergrad.session.attach import attach

STEPS = 4
ROWS = 9
"""Of all sites: no gradient of theirs has more directions."""
LOW = {"rank": ROWS, "min_ratio": 1, "error_feedback": None}
METHODS = {
    "default": None,
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "edad": og.EDAD(always=True),
    "rank-dad": og.RankDAD(**LOW),
    "rank-dad two ways": og.RankDAD(**LOW, reduce="two_way"),
    "rank-dad sums": og.RankDAD(**LOW, reduce="all_reduce"),
    "per layer": og.PerLayer({"0.*": og.RankDAD(**LOW), "*": og.DAD()}),
}


torch.manual_seed(3)
START = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 5), nn.LayerNorm(5)).double()


def build() -> nn.Module:
    """Without the random stream, which all sites of a process share."""
    return copy.deepcopy(START)


def batch(rank: int, step: int) -> torch.Tensor:
    """Of unequal sizes."""
    seed = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2 + rank, 40, generator=seed, dtype=torch.float64)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean() + model[0](x).sin().mean()


def on_hub(sites, body):
    """Runs body(rank, transport) on every site."""
    hub = Hub(sites)
    with ThreadPoolExecutor(sites) as threads:
        return list(threads.map(lambda r: body(r, QueueTransport(hub, r)), range(sites)))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def pooled(sites: int) -> list[list[torch.Tensor]]:
    """Of every step of one process that has all batches, in float64, by autograd alone."""
    model, found = build(), []
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(rank, step)) for rank in range(sites)) / sites).backward()
        found.append(gradients(model))
        optimizer.step()
    return found


def train(model, rank, steps=range(STEPS)):
    """Yields what is in `param.grad` after each backward."""
    optimizer = SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        yield gradients(model)
        optimizer.step()


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_the_pooled_ones(name, sites):
    models = [build() for _ in range(sites)]

    def body(rank, transport):
        session = og.distribute(models[rank], METHODS[name], transport=transport)
        found = list(train(models[rank], rank))
        travels = {line.travels for line in session.coverage()}
        counted = session.stats().total_sent_bytes
        session.detach()
        return found, travels, counted

    expected = pooled(sites)
    for found, travels, counted in on_hub(sites, body):
        for step in range(STEPS):
            for mine, wanted in zip(found[step], expected[step], strict=True):
                assert relative_error(mine, wanted) < 1e-12
        assert counted > 0
        if name == "dad forced":
            assert "factors" in travels
        if name.startswith("rank-dad ") and sites == 3:  # all rows of two are fewer bytes
            assert "low rank" in travels


@pytest.mark.parametrize("name", METHODS)
def test_every_byte_is_booked_on_a_parameter_or_is_a_header(name):
    """By the costs of a star: what a layer sends goes to the hub once."""
    sites = 3

    def body(rank, transport):
        model = build()
        session = og.distribute(model, METHODS[name], transport=transport)
        before = session._at.comm.sent_bytes, session._at.comm.received_bytes
        list(train(model, rank, range(1)))
        stats = session.stats()
        sent = session._at.comm.sent_bytes - before[0], session._at.comm.received_bytes - before[1]
        session.detach()
        return stats, sent

    for stats, (sent, received) in on_hub(sites, body):
        layers = stats.layers.values()
        booked_sent = sum(layer.sent_bytes for layer in layers)
        booked_received = sum(layer.received_bytes for layer in layers)
        assert 0 < booked_sent <= sent
        assert 0 < booked_received <= received
        assert sent - booked_sent < 2500, "headers, preambles, votes"
        assert received - booked_received < 2500 * (sites - 1)


@pytest.mark.parametrize(
    ("name", "sites"),
    covering([name for name in METHODS if name != "default"], [2, 3, 4], quick=3),
)
def test_mirrors_foresee_what_a_star_sends(name, sites):
    """Per layer, of sites with the same batch: by the cost model, not by counting sites."""

    def booked(model, session):
        list(train(model, 2))
        stats = session.stats()
        session.detach()
        layers = stats.layers.items()
        told = {n: (one.sent_bytes, one.received_bytes, one.travels) for n, one in layers}
        return told, stats.total_sent_bytes

    def body(rank, transport):
        model = build()
        session = og.distribute(model, METHODS[name], transport=transport, buffers="local")
        return booked(model, session)

    def mirrored():
        model, comm = build(), MirrorComm(sites, Tracer(), StarCost(sites))
        return booked(model, attach(model, METHODS[name], comm, Link(1e-3, 1e9)))

    told, _ = on_hub(sites, body)[0]
    foreseen, _ = mirrored()
    assert told == foreseen


@pytest.mark.parametrize("turns", [{}, {"stream": 2}, {"overlap": 1}])
def test_local_steps(turns):
    def body(rank, transport):
        model = build()
        method = og.LocalSteps(2, method=og.RankDAD(**LOW), **turns)
        session = og.distribute(model, method, transport=transport)
        list(train(model, rank))
        session.flush()
        session.detach()
        return [p.detach().clone() for p in model.parameters()]

    first, second, third = on_hub(3, body)
    for other in (second, third):
        assert all(map(torch.equal, first, other))


def test_loops_of_unequal_length():
    def body(rank, transport):
        model = build()
        session = og.distribute(model, og.DAD(always=True), transport=transport)
        with session.join():
            found = list(train(model, rank, range(1 + rank)))
        session.detach()
        return found, [p.detach().clone() for p in model.parameters()]

    (_, params), (alone, others) = on_hub(2, body)
    assert all(map(torch.equal, params, others))
    assert len(alone) == 2


def test_several_sessions_and_one_after_another():
    """They know of each other by the key of the transport, and take turns on it."""

    def body(rank, transport):
        found = []
        for _ in range(2):
            models = [build() for _ in range(2)]
            sessions = [og.distribute(m, og.DAD(always=True), transport=transport) for m in models]
            for model in models:
                found.append(next(train(model, rank)))
            for session in sessions:
                session.detach()
        return found

    expected = pooled(2)[0]
    for found in on_hub(2, body):
        assert len(found) == 4
        for one in found:
            for mine, wanted in zip(one, expected, strict=True):
                assert relative_error(mine, wanted) < 1e-12


def test_a_backward_that_raises_discards_the_step_everywhere():
    def body(rank, transport):
        model = build()
        session = og.distribute(model, og.DAD(always=True), transport=transport)
        error = None
        try:
            inside = model[0](batch(rank, 0))
            if rank == 1:
                inside.register_hook(lambda grad: 1 / 0)
            (model[1:](inside) ** 2).sum().backward()
        except (ZeroDivisionError, og.StepDiscardedError) as raised:
            error = raised
        model.zero_grad()
        found = next(train(model, rank))
        session.detach()
        return type(error), found

    (first, found), (second, _) = on_hub(2, body)
    assert (first, second) == (og.StepDiscardedError, ZeroDivisionError)
    for mine, wanted in zip(found, pooled(2)[0], strict=True):
        assert relative_error(mine, wanted) < 1e-12


def lost_by(sites, leave, timeout):
    """The errors of all sites but the last, which goes before its second step."""

    def body(rank, transport):
        model = build()
        session = og.distribute(model, og.DAD(), transport=transport, timeout=timeout)
        steps = train(model, rank)
        next(steps)
        before = [p.detach().clone() for p in model.parameters()]
        if rank == sites - 1:
            return leave(session._at.comm)
        with pytest.raises(og.SiteLostError) as caught:
            list(steps)
        with pytest.raises(og.SiteLostError):
            og.distribute(build(), transport=transport)
        session.detach()
        return caught.value, before

    return on_hub(sites, body)[:-1]


@pytest.mark.parametrize("sites", [2, 3])
def test_a_site_whose_connections_close_is_named(sites):
    for error, _ in lost_by(sites, lambda comm: comm.close(), timeout=20.0):
        assert error.sites == (sites - 1,)
        assert error.step == 1
        assert error.certain
        assert "the connection was closed" in str(error)


def test_a_site_that_stands_still_is_named():
    for error, _ in lost_by(2, lambda comm: None, timeout=0.5):
        assert error.sites == (1,)
        assert "no answer in time" in str(error)


def test_sites_that_differ_are_refused_in_the_same_words():
    def body(rank, transport):
        model = build() if rank == 0 else nn.Linear(40, 5)
        with pytest.raises(ValueError, match="the sites do not agree") as caught:
            og.distribute(copy.deepcopy(model), transport=transport)
        return str(caught.value)

    first, second = on_hub(2, body)
    assert first == second


def test_a_checkpoint_goes_on_to_the_bit(tmp_path):
    def body(rank, transport):
        def start():
            model = build()
            method = og.RankDAD(rank=2)
            session = og.distribute(model, method, transport=transport)
            saver = og.Checkpoints(tmp_path, session, model=model)
            return model, session, saver

        model, session, saver = start()
        list(train(model, rank, range(2)))
        saver.save(2)
        straight = list(train(model, rank, range(2, 4)))
        session.detach()
        again, session, saver = start()
        assert saver.restore().step == 2
        resumed = list(train(again, rank, range(2, 4)))
        session.detach()
        return straight, resumed

    for straight, resumed in on_hub(2, body):
        for one, other in zip(straight, resumed, strict=True):
            assert all(map(torch.equal, one, other))
