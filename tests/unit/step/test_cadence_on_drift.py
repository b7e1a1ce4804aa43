"""Methods with `every=og.OnDrift(...)`: gradients add up until one site sees drift."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import outergrad as og
from cases import SHARED_STREAM, Boom, Events, build, mlp, relative_error, run, to_double
from covering import covering
from jumping import JUMP, STEADY, Jumps
from ranks import run_on_lasting_groups

pytestmark = pytest.mark.usefixtures("large_matrices")

CASES = build()
OBSERVED = og.OnDrift(Jumps(), of="observed")
EXACT = {
    "dense": og.Dense,
    "dad": og.DAD,
    "dad raw forced": lambda **k: og.DAD(always=True, reveal="activations", **k),
    "dad forced": lambda **k: og.DAD(always=True, **k),
    "edad forced": lambda **k: og.EDAD(always=True, **k),
    "rank-dad, full rank": lambda **k: og.RankDAD(rank=1000, **k),
    "powersgd, full rank": lambda **k: og.PowerSGD(rank=1000, min_ratio=1, **k),
    "sparse, all entries": lambda **k: og.Sparse(density=1.0, always=True, **k),
}
ROUNDED = {
    "rank-dad": lambda **k: og.RankDAD(rank=2, **k),
    "powersgd": lambda **k: og.PowerSGD(rank=2, min_ratio=1, **k),
    "sparse": lambda **k: og.Sparse(density=0.1, **k),
}
NET = mlp(6, 24, 24, 5)


def batch(rank, number):
    """Other rows at every site and in every pass."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(1 + (number + rank) % 3, 6, generator=generator)


def loss(net, x, raises=False):
    return (Boom.apply(net(x), raises) ** 2).sum() / 10


def mean_of(sites, numbers):
    """The mean over these passes and the sites, in float64."""
    net = copy.deepcopy(NET).double()
    for number in numbers:
        for rank in range(sites):
            (loss(net, batch(rank, number).double()) / (sites * len(numbers))).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def assert_close(net, expected):
    for name, p in net.named_parameters():
        assert relative_error(p.grad, expected[name]) < 5e-6, name


def distributed(method, group, net=NET, **settings):
    net = copy.deepcopy(net)
    return net, og.distribute(net, method, group=group, **settings)


@pytest.mark.parametrize(("name", "sites"), covering(EXACT.keys(), [1, 2, 3], quick=3, every=1))
def test_the_gradient_is_the_mean_over_the_passes_since_the_last_drift(name, sites):
    last, drifts = sites - 1, {2: range(3), 3: range(3, 4), 8: range(4, 9)}

    def body(rank, group):
        net, session = distributed(EXACT[name](every=OBSERVED), group)
        for number in range(10):
            net.zero_grad()
            session.observe(JUMP if number in drifts and rank == last else STEADY)
            loss(net, batch(rank, number)).backward()
            if number in drifts:
                assert_close(net, mean_of(sites, drifts[number]))
            else:
                assert all(p.grad is None for p in net.parameters())
        session.detach()

    run_on_lasting_groups(sites, body)


@pytest.mark.parametrize(("name", "label"), covering(CASES.keys(), EXACT.keys(), quick=16, every=8))
def test_every_layer_waits_for_drift(name, label):
    if name in SHARED_STREAM:
        pytest.skip("threads share one random stream")
    case, sites, k = CASES[name](), 2, 3
    whole = copy.deepcopy(case.model).double()
    for one in case.batches[:sites]:
        for weight in range(1, k + 1):
            (run(whole, case, to_double(one)) * weight / (k * sites)).backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def body(rank, group):
        net, session = distributed(EXACT[label](every=OBSERVED), group, case.model)
        for _ in range(2):
            net.zero_grad()
            for weight in range(1, k + 1):
                session.observe(JUMP if weight == k and rank == 1 else STEADY)
                (weight * run(net, case, case.batches[rank])).backward()
        session.detach()
        return net

    for net in run_on_lasting_groups(sites, body):
        assert_close(net, expected)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_nothing_but_votes_travels_in_between(name):
    def body(rank, group):
        make = {**EXACT, **ROUNDED}[name]
        net, session = distributed(make(every=og.OnDrift(Jumps(), of="observed", check=2)), group)
        sent = []
        for number in range(12):
            net.zero_grad()
            before = session.transport().sent_bytes
            session.observe(JUMP if number in (3, 9) and rank == 0 else STEADY)
            loss(net, batch(rank, number)).backward()
            sent.append(session.transport().sent_bytes - before)
        session.detach()
        return sent

    for sent in run_on_lasting_groups(2, body):
        for number, count in enumerate(sent):
            if number in (3, 9):
                assert count > 100
            else:
                assert count == number % 2  # a byte, in every second pass


def test_losses_tell_by_themselves_and_in_the_same_pass():
    def body(rank, group):
        net, session = distributed(og.DAD(every=og.OnDrift(Jumps())), group)
        shared = []
        for number in range(5):
            net.zero_grad()
            found = loss(net, batch(rank, number))
            wanted = 3.0 if (rank, number) == (1, 3) else 0.1
            (found * (wanted / found.detach())).backward()
            shared.append(any(p.grad is not None for p in net.parameters()))
        session.detach()
        return shared

    assert run_on_lasting_groups(2, body) == [[False] * 3 + [True, False]] * 2


def test_parts_with_other_intervals_go_by_their_own():
    method = og.PerLayer({"0.*": og.Dense(every=OBSERVED), "2.*": og.DAD(every=2), "*": og.DAD()})

    def body(rank, group):
        net, session = distributed(method, group)
        shared = []
        for number in range(6):
            net.zero_grad()
            session.observe(JUMP if (rank, number) == (0, 2) else STEADY)
            loss(net, batch(rank, number)).backward()
            shared.append([net[k].weight.grad is not None for k in (0, 2, 4)])
            if number == 2:
                expected = mean_of(2, range(3))["0.weight"]
                assert relative_error(net[0].weight.grad, expected) < 5e-6
        session.detach()
        return shared

    expected = [[n == 2, n % 2 == 1, True] for n in range(6)]
    assert run_on_lasting_groups(2, body) == [expected] * 2


def test_passes_in_no_sync_are_part_of_the_mean_s_sum():
    """They add to the pass behind them, as with every=k; their values wait for its check."""

    def body(rank, group):
        net, session = distributed(og.DAD(every=OBSERVED), group)
        session.observe(JUMP if rank == 0 else STEADY)
        with session.no_sync():
            loss(net, batch(rank, 0)).backward()
        loss(net, batch(rank, 1)).backward()
        session.detach()
        return net

    expected = {name: 2 * g for name, g in mean_of(2, [0, 1]).items()}
    for net in run_on_lasting_groups(2, body):
        assert_close(net, expected)


@pytest.mark.parametrize("drifts", [(), (2,), (3,), (2, 3), (3, 4, 5)])
@pytest.mark.parametrize("fails", [{(0, 2)}, {(0, 2), (0, 3)}, {(0, 2), (1, 2), (1, 3)}])
def test_a_pass_that_raised_before_the_model_votes_all_the_same(fails, drifts):
    """Whether it was one that shares or not, both sites go on together."""

    def body(rank, group):
        net, session = distributed(og.Dense(every=OBSERVED), group)
        shared = []
        for number in range(8):
            net.zero_grad()
            session.observe(JUMP if rank == 1 and number in (*drifts, 6) else STEADY)
            try:
                loss(net, batch(rank, number), (rank, number) in fails).backward()
            except (ArithmeticError, og.StepDiscardedError):
                continue
            if any(p.grad is not None for p in net.parameters()):
                shared.append((number, [p.grad.clone() for p in net.parameters()]))
        checks = session.stats().drift_exchanges
        session.detach()
        return shared, checks

    (ours, checks), (theirs, others) = run_on_lasting_groups(2, body)
    failed = {number for _, number in fails}
    assert [number for number, _ in ours] == [number for number, _ in theirs]
    assert [n for n, _ in ours] == [n for n in (*drifts, 6) if n not in failed]
    assert checks == others == len(drifts) + 1
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", ["dense", "dad forced", "rank-dad", "powersgd", "sparse"])
@pytest.mark.parametrize("saved_after", [2, 3, 4])
def test_accumulated_gradients_and_the_detector_go_on_to_the_bit(name, saved_after):
    method = {**EXACT, **ROUNDED}[name](every=og.OnDrift(Jumps(), of="observed", most=6))
    parts = {(1, 1): JUMP / 3, (1, 4): JUMP / 3}

    def passes(net, session, rank, start, stop):
        found = []
        for number in range(start, stop):
            net.zero_grad()
            session.observe(parts.get((rank, number), STEADY))
            loss(net, batch(rank, number)).backward()
            found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        return found

    def body(rank, group):
        net, session = distributed(method, group)
        passes(net, session, rank, 0, saved_after)
        file = io.BytesIO()
        torch.save(session.state_dict(), file)
        expected = passes(net, session, rank, saved_after, 14)
        session.detach()
        again, other = distributed(method, group)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        found = passes(again, other, rank, saved_after, 14)
        other.detach()
        shared = [saved_after + k for k, gs in enumerate(expected) if gs[0] is not None]
        assert shared == [4, 10]
        for ours, theirs in zip(found, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a is None) == (b is None)
                assert a is None or a.equal(b)

    run_on_lasting_groups(2, body)


def test_recorded_measures_are_of_the_mean_over_the_passes_there_were():
    def body(rank, group):
        events = Events()
        method = og.Dense(every=OBSERVED)
        net, session = distributed(method, group, nn.Linear(6, 5), recorder=events)
        norms = []
        for number in range(5):
            net.zero_grad()
            session.observe(JUMP if number in (2, 4) else STEADY)
            loss(net, batch(rank, number)).backward()
            norms += [] if net.weight.grad is None else [float(net.weight.grad.norm())]
        session.detach()
        told = [e.mean_norm for e in events.layers if e.layer == "weight"]
        assert told == pytest.approx(norms)
        return len(told)

    assert run_on_lasting_groups(2, body) == [2, 2]
