"""Exchanges on drift: the detector of one site calls, all sites hear it in a vote and exchange."""

from __future__ import annotations

import io
from contextlib import nullcontext

import pytest
import torch
from examples.privacy import ClippedSite
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import Events, mlp, relative_error
from jumping import JUMP, REFUSED_VALUE, STEADY, Jumps
from ranks import run_on_lasting_groups, try_ranks
from sites_apart import INNER, LOW_RANK, Site, batch, loss, model, plain, train

OBSERVED = og.OnDrift(Jumps(), of="observed")
BOUNDED = og.OnDrift(Jumps(), of="observed", most=5)


class Observing(Site):
    """A site that observes a value before each of its steps: a jump in some of them."""

    def jumping(self, stop, jumps, start=0):
        for number in range(start, stop):
            jumped = (self.rank, number) in jumps
            self.session.observe(JUMP if jumped else STEADY)
            self.steps(number, number + 1)
        return self


def reference(sites, exchanges, steps, inner="sgd"):
    """Local training in float64, with the mean of the weights after some steps."""
    replicas = [model().double() for _ in range(sites)]
    optimizers = [INNER[inner](replica.parameters()) for replica in replicas]
    for number in range(steps):
        for rank, replica in enumerate(replicas):
            train(replica, [optimizers[rank]], rank, [number])
        if number in exchanges:
            for several in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = sum(p.detach() for p in several) / sites
                for p in several:
                    p.data.copy_(mean)
    return replicas


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("sites", [1, 2, 3])
def test_sites_exchange_where_one_sees_drift_and_nowhere_else(sites, inner):
    last = sites - 1
    jumps = {(last, 2), (0, 6), (last, 6), (0, 7)}
    expected = reference(sites, {2, 6, 7}, 10, inner)

    def body(rank, group):
        site = Observing(og.LocalSteps(OBSERVED), rank, group, inner).jumping(10, jumps)
        made = site.session.stats().step
        site.session.detach()
        return site.model, made

    for rank, (net, made) in enumerate(run_on_lasting_groups(sites, body)):
        assert made == 3
        for p, q in zip(net.parameters(), expected[rank].parameters(), strict=True):
            assert relative_error(p.detach(), q.detach()) < 1e-5


@pytest.mark.parametrize("method", LOW_RANK.values(), ids=LOW_RANK)
def test_every_method_exchanges_on_drift(method):
    def body(rank, group):
        site = Observing(og.LocalSteps(OBSERVED, method=method), rank, group)
        weights = [site.jumping(n + 1, {(1, 2), (0, 5)}, start=n).weights() for n in range(8)]
        site.session.flush()
        site.session.detach()
        return [*weights, site.weights()]

    ours, theirs = run_on_lasting_groups(2, body)
    alike = [all(map(torch.equal, a, b)) for a, b in zip(ours, theirs, strict=True)]
    assert alike == [n in (2, 5, 8) for n in range(9)]


@pytest.mark.parametrize(("check", "most"), [(1, 4), (2, 4), (4, 4), (3, 9)])
def test_without_drift_they_exchange_after_most_steps(check, most):
    def body(rank, group):
        on_drift = og.OnDrift(Jumps(), of="observed", check=check, most=most)
        site = Observing(og.LocalSteps(on_drift), rank, group)
        made = []
        for number in range(20):
            site.jumping(number + 1, (), start=number)
            made.append(site.session.stats().step)
        stats = site.session.stats()
        site.session.detach()
        return made, stats.drift_exchanges, stats.drifted

    made = [(n + 1) // most for n in range(20)]
    assert run_on_lasting_groups(2, body) == [(made, made[-1], ())] * 2


def test_a_drift_between_two_checks_is_heard_at_the_next():
    def body(rank, group):
        site = Observing(og.LocalSteps(og.OnDrift(Jumps(), of="observed", check=3)), rank, group)
        made = []
        for number in range(9):
            site.jumping(number + 1, {(1, 3)}, start=number)
            made.append(site.session.stats().step)
        site.session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [[0] * 5 + [1] * 4] * 2


def test_a_vote_is_a_byte_to_each_other_site():
    def body(rank, group):
        site = Observing(og.LocalSteps(OBSERVED), rank, group)
        comm = site.session.transport()
        before = comm.sent_bytes, comm.received_bytes
        site.jumping(7, ())
        found = comm.sent_bytes - before[0], comm.received_bytes - before[1]
        site.session.detach()
        return found

    assert run_on_lasting_groups(3, body) == [(14, 14)] * 3


def test_losses_are_what_a_detector_hears_by_itself():
    """One site's loss jumps; passes of another model are no concern of it."""

    def body(rank, group):
        net, other = model(), nn.Linear(3, 1)
        session = og.distribute(net, og.LocalSteps(og.OnDrift(Jumps())), group=group)
        optimizer, made = SGD(net.parameters(), lr=1e-3), []
        for number in range(6):
            optimizer.zero_grad()
            (100 * other(torch.ones(1, 3)).exp().sum()).backward()
            x = batch(rank, number)
            wanted = 3.0 if (rank, number) == (1, 3) else 0.1
            found = loss(net(x))
            (found * (wanted / found.detach())).backward()
            optimizer.step()
            made.append(session.stats().step)
        drifted = session.stats().drifted
        session.detach()
        return made, drifted

    assert run_on_lasting_groups(2, body) == [([0] * 3 + [1] * 3, ("site 1",))] * 2


def test_the_decision_is_recorded_alike_at_all_sites():
    def body(rank, group):
        events = Events()
        on_drift = og.OnDrift(Jumps(), of="observed", most=5)
        site = Observing(og.LocalSteps(on_drift), rank, group, recorder=events)
        site.jumping(9, {(0, 2), (1, 2)})
        stats = site.session.stats()
        site.session.detach()
        told = [e for e in events if isinstance(e, og.events.Drift)]
        return [(e.step, e.checks, e.sites) for e in told], stats.drift_exchanges, stats.drifted

    drifts = [(0, 3, ("site 0", "site 1")), (1, 5, ())]
    assert run_on_lasting_groups(2, body) == [(drifts, 2, ())] * 2


@pytest.mark.parametrize("method", [og.LocalSteps(OBSERVED), og.Dense(every=OBSERVED)])
def test_the_coverage_says_when_and_what_that_tells(method):
    def body(rank, group):
        site = Site(method, rank, group)
        lines = {line.parameter: line for line in site.session.coverage()}
        site.session.detach()
        return lines["0.weight"]

    for line in run_on_lasting_groups(2, body):
        assert "on drift" in line.why
        assert line.reveals.endswith(", and when its data drift")


@pytest.mark.parametrize("saved_after", [2, 3, 4, 5])
def test_training_goes_on_to_the_bit(saved_after):
    """The halves of a jump come before and behind the save, which is between two checks as well."""
    on_drift = og.OnDrift(Jumps(), of="observed", check=2, most=8)
    halves = {(1, 2): JUMP / 3, (1, 5): JUMP / 3}

    def steps(site, start, stop):
        made = []
        for number in range(start, stop):
            site.session.observe(halves.get((site.rank, number), STEADY))
            site.steps(number, number + 1)
            made.append(site.session.stats().step)
        return made

    def body(rank, group):
        whole = Site(og.LocalSteps(on_drift), rank, group, "momentum")
        steps(whole, 0, saved_after)
        file = io.BytesIO()
        torch.save([p.state_dict() for p in (whole.model, whole.optimizer, whole.session)], file)
        expected = steps(whole, saved_after, 16)
        again = Site(og.LocalSteps(on_drift), rank, group, "momentum")
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again.model, again.optimizer, again.session), states, strict=True):
            part.load_state_dict(state)
        assert steps(again, saved_after, 16) == expected
        assert again.session.stats().drift_exchanges == whole.session.stats().drift_exchanges == 2
        assert all(map(torch.equal, again.weights(), whole.weights()))
        return expected

    first, second = run_on_lasting_groups(2, body)
    assert first == second


def test_an_exchange_that_the_loop_asks_for_begins_anew():
    """`flush` is an exchange: what was seen before it counts no more."""

    def body(rank, group):
        on_drift = og.OnDrift(Jumps(), of="observed", most=4)
        site, made = Site(og.LocalSteps(on_drift), rank, group), []
        for number in range(8):
            site.session.observe(JUMP / 3)
            site.steps(number, number + 1)
            if number == 0:
                site.session.flush()
            made.append(site.session.stats().step)
        site.session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [[1, 1, 2, 2, 3, 3, 4, 4]] * 2


@pytest.mark.parametrize(("jump", "discarded"), [(JUMP, 2), (STEADY, 3)])
def test_an_exchange_that_was_discarded_is_made_at_the_next_check(jump, discarded):
    """Whether it was due by a drift, which the detector still sees, or by `most`."""

    def body(rank, group):
        on_drift = og.OnDrift(Jumps(), of="observed", most=4)
        site, led = Site(og.LocalSteps(on_drift), rank, group), []
        finish = site.session._loop.finish

        def finish_in_vain(step):
            finish(step)
            raise og.StepDiscardedError("a message was damaged")

        for number in range(10):
            site.session.observe(jump if number == 2 else STEADY)
            fails = number == discarded
            site.session._loop.finish = finish_in_vain if fails else finish
            before = site.session.stats().drift_exchanges
            with pytest.raises(og.StepDiscardedError) if fails else nullcontext():
                site.steps(number, number + 1)
            led += [number] * (site.session.stats().drift_exchanges - before)
        site.session.detach()
        return led

    made = [discarded, discarded + 1, discarded + 5]
    assert run_on_lasting_groups(2, body) == [made] * 2


# -- mistakes, which all sites hear of ------------------------------------------------------------


def observes_nothing(site, number):
    if (site.rank, number) != (1, 2):
        site.session.observe([STEADY, STEADY])


def observes_an_empty_batch(site, number):
    site.session.observe(torch.full((3 * int((site.rank, number) != (1, 2)),), STEADY))


def observes_nan(site, number):
    site.session.observe(float("nan") if (site.rank, number) == (1, 2) else STEADY)


def observes_what_its_detector_refuses(site, number):
    site.session.observe(REFUSED_VALUE if (site.rank, number) == (1, 2) else STEADY)


MISTAKES = {
    observes_nothing: "site 1 observed nothing since the last check: call session.observe",
    observes_an_empty_batch: "site 1 observed nothing since the last check: call session.observe",
    observes_nan: "site 1 observed a value that is not finite, which no detector can judge",
    observes_what_its_detector_refuses: "site 1 had a detector that raised: the error is the cause",
}


@pytest.mark.parametrize("method", [og.LocalSteps(BOUNDED), og.DAD(every=BOUNDED)])
@pytest.mark.parametrize("observes", MISTAKES, ids=lambda f: f.__name__)
def test_what_no_detector_can_judge_is_an_error_at_all_sites(observes, method):
    """It is of that check alone: the sites go on together, and exchange when they would have."""

    def body(rank, group):
        site, made = Site(method, rank, group), []
        for number in range(5):
            observes(site, number)
            if number == 2:
                with pytest.raises(RuntimeError, match=f"OnDrift: {MISTAKES[observes]}") as caught:
                    site.steps(number, number + 1)
                raised = isinstance(caught.value.__cause__, ArithmeticError)
                refused = observes is observes_what_its_detector_refuses
                assert raised == (refused and rank == 1)
            else:
                site.steps(number, number + 1)
            made.append(site.session.stats().step)
        site.session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [[0, 0, 0, 0, 1]] * 2


def test_a_loss_that_is_not_one_number_is_an_error_at_all_sites():
    def body(rank, group):
        net = model()
        session = og.distribute(net, og.LocalSteps(og.OnDrift(Jumps())), group=group)
        optimizer = SGD(net.parameters(), lr=0.1)
        y = net(batch(rank, 0))
        y.backward(torch.zeros_like(y)) if rank == 0 else (0 * loss(y)).backward()
        with pytest.raises(RuntimeError, match=r"site 0 had no backward of one loss.*'observed'"):
            optimizer.step()
        session.detach()

    run_on_lasting_groups(2, body)


def test_a_scaler_would_scale_the_losses():
    net = model()

    def body(rank, group):
        session = og.distribute(net, og.LocalSteps(og.OnDrift(Jumps())), group=group)
        optimizer = SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss(net(batch(0, 0)))).backward()
        with pytest.raises(RuntimeError, match=r"GradScaler scales the losses.*of='observed'"):
            scaler.step(optimizer)
        session.detach()

    run_on_lasting_groups(1, body)


def test_observing_is_refused_where_nobody_listens():
    def body(rank, group):
        site = Site(og.LocalSteps(2), rank, group)
        with pytest.raises(RuntimeError, match=r"no exchange waits for a drift.*of='observed'"):
            site.session.observe(1.0)
        site.session.detach()
        site = Site(og.LocalSteps(og.OnDrift(Jumps())), rank, group)
        with pytest.raises(RuntimeError, match=r"listens to the losses.*of='observed'"):
            site.session.observe(1.0)
        site.session.detach()
        site = Site(og.LocalSteps(OBSERVED), rank, group)
        with pytest.raises(TypeError, match=r"observe\(a str\): pass a number, or a tensor"):
            site.session.observe("0.5")
        site.session.detach()

    run_on_lasting_groups(1, body)


def test_sites_at_different_checks_say_so():
    """One site is a step ahead: its vote is not taken for another's."""

    def body(rank, group):
        site = Site(og.LocalSteps(OBSERVED), rank, group)
        site.session._exchange.drift._votes += rank
        site.session.observe(STEADY)
        with pytest.raises(RuntimeError, match=r"site \d is at another check than site \d: every"):
            site.steps(0, 1)
        site.session.detach()

    run_on_lasting_groups(2, body)


TWO = og.PerLayer(
    {"0.*": og.Dense(every=OBSERVED), "*": og.Dense(every=og.OnDrift(Jumps(), most=2))}
)
REFUSED = {
    "two drifts": (TWO, {}, "og.OnDrift is given twice"),
    "transform": (
        og.LocalSteps(OBSERVED),
        {"transform": ClippedSite(1.0)},
        "og.OnDrift tells the other sites when this site's data change",
    ),
    "samples": (
        og.PerLayer({"0.*": og.Dense(every=OBSERVED), "*": og.Dense(every=3)}),
        {"weighting": "samples"},
        "give all methods one every=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_at_all_sites(name):
    method, settings, message = REFUSED[name]

    def body(rank, group):
        og.distribute(mlp(6, 9, 5), method, group=group, **settings)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert message in str(error)


def test_sites_have_the_same_detector():
    def body(rank, group):
        Site(og.LocalSteps(og.OnDrift(Jumps(), most=2 + rank)), rank, group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "most=2" in str(error)
        assert "most=3" in str(error)


def test_a_site_alone_decides_alone():
    def body(rank, group):
        site = Observing(og.LocalSteps(OBSERVED, outer=plain), rank, group)
        site.jumping(6, {(0, 4)})
        found = site.session.stats().drift_exchanges, site.session.stats().drifted
        site.session.detach()
        return found

    assert run_on_lasting_groups(1, body) == [(1, ("site 0",))]
