"""All sites stop before the same step, and agree on what was counted before."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import outergrad as og
from cases import Boom, mlp
from outergrad.private import (
    BudgetSpentError,
    CollateEmpty,
    Fixed,
    FixedSampler,
    Ledger,
    Poisson,
    PoissonSampler,
    Release,
    Run,
)
from outergrad.private.counting import StepCounter
from ranks import run_on_lasting_groups

pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
DELTA, NOISE, RATE = 1e-5, 1.1, 0.01
MODEL = mlp(6, 7, 5)
STEP = Release(NOISE, Poisson(RATE), sites=2, sums="open")


def quick(**about):
    return Ledger(DELTA, accountant="rdp", **about)


def epsilon_of(steps, release=STEP):
    ledger = quick()
    ledger.record(release, steps)
    return ledger.epsilon()


def session_of(ledger, group, **about):
    model = copy.deepcopy(MODEL)
    settings = {"clip": 1.0, "noise": NOISE, "batch": 6, "sampling": Poisson(RATE)}
    private = og.Private(**(settings | about), ledger=ledger)
    return model, og.distribute(model, og.Dense(), group=group, transform=private)


def steps_until_spent(model, most=20):
    """Number of steps made, and the error behind them, if there was one."""
    for step in range(most):
        model.zero_grad()
        try:
            model(torch.randn(3, 6)).square().mean().backward()
        except BudgetSpentError as error:
            return step, error
    return most, None


# -- the budget -----------------------------------------------------------------------------------


def test_all_stop_before_the_same_step_and_nothing_was_sent():
    def body(rank, group):
        ledger = quick(stop_at=epsilon_of(5))
        model, session = session_of(ledger, group)
        made, error = steps_until_spent(model)
        grads = [p.grad for p in model.parameters()]
        sent = session.stats().total_sent_bytes
        again, _ = steps_until_spent(model)
        told = session.stats()
        session.detach()
        return made, again, error.steps, error.stop_at, grads, sent == told.total_sent_bytes, told

    for made, again, steps, stop_at, grads, is_all, told in run_on_lasting_groups(2, body):
        assert (made, again, steps, told.step, told.private_steps) == (5, 0, 5, 5, 5)
        assert stop_at == epsilon_of(5)
        assert grads == [None] * len(grads)
        assert is_all


def test_a_site_whose_accountant_says_otherwise_stops_all():
    """Floating-point numbers may differ between machines: the least room counts."""

    class Careful(Ledger):
        def _epsilon(self, *args, **kwargs):
            return 1.05 * super()._epsilon(*args, **kwargs)

    def body(rank, group):
        kind = Careful if rank == 1 else Ledger
        ledger = kind(DELTA, accountant="rdp", stop_at=epsilon_of(12))
        model, session = session_of(ledger, group)
        made, error = steps_until_spent(model)
        session.detach()
        return made, error is not None

    first, second = run_on_lasting_groups(2, body)
    assert first == second
    assert first[0] < 12
    assert first[1]


def test_sites_speak_seldom():
    """Of their room, which doubles: not in every step."""
    spoken = []

    class Speaking(StepCounter):
        def _agree(self, comm):
            spoken.append(comm.rank)
            return super()._agree(comm)

    def body(rank, group):
        ledger = quick(stop_at=epsilon_of(1000))
        model, session = session_of(ledger, group)
        session._exchange.counter.__class__ = Speaking
        made, _ = steps_until_spent(model, 40)
        session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [40, 40]
    assert spoken.count(0) == spoken.count(1) == 6  # before steps 0, 1, 3, 7, 15, 31


def test_a_site_without_dp_accounting_is_named():
    def body(rank, group):
        class Lacking(Ledger):
            def _fits(self, release, steps):
                if rank == 1:
                    raise ImportError("dp_accounting not found: pip install 'dp-accounting>=0.6'")
                return super()._fits(release, steps)

        ledger = Lacking(DELTA, stop_at=3.0, accountant="rdp")
        model, session = session_of(ledger, group)
        found = None
        try:
            model(torch.randn(3, 6)).square().mean().backward()
        except Exception as error:
            found = error
        session.detach()
        return found, ledger.steps

    (first, none), (second, nothing) = run_on_lasting_groups(2, body)
    assert (none, nothing) == (0, 0)
    assert "site 1 could not count the next step" in str(first)
    assert isinstance(second, ImportError)


@pytest.mark.parametrize("noises", [(NOISE, NOISE), (NOISE, 2.0)])
def test_two_sessions_share_a_budget(noises):
    """As of a generator and a discriminator, in turn."""

    def body(rank, group):
        ledger = quick(stop_at=epsilon_of(6))
        both = [session_of(ledger, group, noise=noise) for noise in noises]
        made, k = [0, 0], 0
        while steps_until_spent(both[k % 2][0], 1)[0]:
            made[k % 2] += 1
            k += 1
        for _, session in both:
            session.detach()
        return made, ledger.epsilon(), ledger.steps

    for made, spent, steps in run_on_lasting_groups(2, body):
        assert steps == sum(made)
        assert spent <= epsilon_of(6)
        if noises[0] == noises[1]:
            assert made == [3, 3]
        else:
            assert 6 < sum(made) < 100


def test_a_site_whose_step_raised_where_the_budget_ends_stops_with_the_others():
    """In its loss, before it could begin the step. The others do not wait for it afterwards."""

    def body(rank, group):
        ledger = quick(stop_at=epsilon_of(3))
        model, session = session_of(ledger, group)
        if rank == 1:
            steps_until_spent(model, 3)
            model.zero_grad()
            loss = model(torch.randn(3, 6)).square().mean()
            with pytest.raises(ArithmeticError):
                Boom.apply(loss, True).backward()
        made, error = steps_until_spent(model)
        session.detach()
        return made, error.steps, ledger.steps

    assert run_on_lasting_groups(2, body) == [(3, 3, 3), (0, 3, 3)]


# -- ledgers of sites that differ -----------------------------------------------------------------


def resumed(histories):
    """Ledgers of sites after a step, if they had counted this before; or their errors."""

    def body(rank, group):
        ledger = quick()
        for release, steps in histories[rank]:
            ledger.record(release, steps)
        model, session = session_of(ledger, group)
        try:
            steps_until_spent(model, 1)
        except ValueError as error:
            return str(error)
        finally:
            session.detach()
        return ledger.runs

    return run_on_lasting_groups(len(histories), body)


def test_sites_go_on_from_the_longest_count(caplog):
    """Of those that were killed, one had counted a step that the other had not begun."""
    other = Release(2.0, Poisson(RATE), sites=2, sums="open")
    with caplog.at_level(logging.WARNING, "outergrad"):
        found = resumed([[(other, 3), (STEP, 4)], [(other, 3), (STEP, 5)]])
    assert found == [(Run(other, 3), Run(STEP, 6))] * 2
    assert "the ledger of site 0 had 7 steps in 2 runs, that of site 1 has 8" in caplog.text
    assert resumed([[], [(other, 3)]]) == [(Run(other, 3), Run(STEP, 1))] * 2


def test_another_history_is_an_error_that_names_the_site():
    other = Release(2.0, Poisson(RATE), sites=2, sums="open")
    for error in resumed([[(STEP, 4)], [(other, 3)]]):
        assert "the ledger of site 1 has other releases (3 steps in 1 runs)" in error


def test_settings_of_ledgers_that_differ_are_an_error():
    def body(rank, group):
        with pytest.raises(ValueError, match=r"site 1 has ['\"]transform: .*stop_at=4"):
            session_of(Ledger(DELTA, stop_at=3 + rank), group)

    run_on_lasting_groups(2, body)


def test_a_site_that_comes_later_takes_over_the_count():
    """It has compared nothing yet, and the others have: batches are compared at the start alone."""

    def body(rank, group):
        comm = og.TorchDistributed().open(torch.device("cpu"), group=group)
        ledger = quick(stop_at=9.0)
        counter = StepCounter(ledger, NOISE, Poisson(RATE), 6.0, 3.0)
        if rank == 0:
            ledger.record(STEP, 7)
            counter._is_new = False
        counter.begin(comm)
        return ledger.runs

    assert run_on_lasting_groups(2, body) == [(Run(STEP, 8),)] * 2


def test_sites_that_are_threads_need_a_ledger_each():
    shared = quick()

    def body(rank, group):
        model, session = session_of(shared, group)
        found = []
        try:
            steps_until_spent(model, 1)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
        session.detach()
        return found

    told = sorted(one[0] for one in run_on_lasting_groups(2, body))
    assert "give every site a Ledger of its own" in told[0]
    assert "could not count the next step" in told[1]
    assert shared.steps == 0


# -- the expected batch ---------------------------------------------------------------------------


def loader_of(rows, rate=0.1, size=None):
    data = TensorDataset(torch.randn(rows, 6))
    if size is not None:
        return DataLoader(data, batch_sampler=FixedSampler(rows, size))
    sampler = PoissonSampler(rows, rate)
    return DataLoader(data, batch_sampler=sampler, collate_fn=CollateEmpty(data))


@pytest.mark.parametrize("batch", [12.0, 12.05, 6.0])
def test_batch_is_what_the_loaders_of_all_sites_draw(batch):
    def body(rank, group):
        about = {"sampling": loader_of([40, 80][rank]), "batch": batch}
        model, session = session_of(quick(), group, **about)
        try:
            return steps_until_spent(model, 1)[0]
        except ValueError as error:
            return str(error)
        finally:
            session.detach()

    for found in run_on_lasting_groups(2, body):
        if batch == 6.0:
            assert "draw 12 samples per step on average" in found
            assert "pass batch=12 on every site" in found
        else:
            assert found == 1


def test_fixed_batches_are_compared_and_rates_alone_cannot_be():
    def body(rank, group):
        model, session = session_of(quick(), group, sampling=Fixed(3, 60), batch=6)
        steps_until_spent(model, 1)
        session.detach()
        model, session = session_of(quick(), group, sampling=Fixed(3, 60), batch=7)
        with pytest.raises(ValueError, match="draw 6 samples"):
            steps_until_spent(model, 1)
        session.detach()
        model, session = session_of(quick(), group, batch=1000)
        made, _ = steps_until_spent(model, 1)
        session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [1, 1]


def test_what_is_no_sampling_is_refused():
    with pytest.raises(ValueError, match=r"sampling=0\.01; use og\.private\.Poisson"):
        og.Private(clip=1, noise=1, batch=6, ledger=quick(), sampling=0.01)
    for alone in ({"ledger": quick()}, {"sampling": Poisson(RATE)}):
        with pytest.raises(ValueError, match="use a ledger together with sampling="):
            og.Private(clip=1, noise=1, batch=6, **alone)
    with pytest.raises(ValueError, match="use a Ledger, or None"):
        og.Private(clip=1, noise=1, batch=6, ledger="file.json", sampling=Poisson(RATE))
    shuffled = DataLoader(TensorDataset(torch.randn(30, 6)), 5, shuffle=True)
    private = og.Private(clip=1, noise=1, batch=10, ledger=quick(), sampling=shuffled)
    assert private.sampling == Fixed(5, 30, fresh=False)
    refused = DataLoader(range(30), sampler=torch.utils.data.RandomSampler(range(30), True))
    with pytest.raises(ValueError, match="no bound of privacy is known"):
        og.Private(clip=1, noise=1, batch=6, ledger=quick(), sampling=refused)
