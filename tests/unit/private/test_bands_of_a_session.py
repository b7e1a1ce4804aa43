"""A session counts noise in bands as dp-accounting does by hand, by the turns of each part."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import outergrad as og
from cases import Boom, mlp
from outergrad.private import (
    BudgetSpentError,
    CollateEmpty,
    CyclicPoisson,
    CyclicPoissonSampler,
    Ledger,
    Poisson,
    PoissonSampler,
)
from outergrad.private.correlated import Banded
from outergrad.private.counting import StepCounter
from ranks import run_on_lasting_groups
from stars import goes_on_without_the_last, on_star, on_star_with_a_line

dp = pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
DELTA, NOISE, RATE, PARTS = 1e-5, 1.6, 0.02, 4
MODEL = mlp(6, 7, 5)


def by_hand(noises, accountant="rdp"):
    """ε of so many turns of a part, by noise."""
    of = dp.rdp.RdpAccountant() if accountant == "rdp" else dp.pld.PLDAccountant()
    for noise, turns in noises:
        one = dp.PoissonSampledDpEvent(RATE * PARTS, dp.GaussianDpEvent(noise))
        of.compose(one, turns)
    return of.get_epsilon(DELTA)


def private_of(ledger, **about):
    settings = {"clip": 1.0, "noise": NOISE, "batch": 6, "bands": PARTS}
    given = {"sampling": CyclicPoisson(RATE, PARTS), "ledger": ledger}
    return og.Private(**(settings | given | about))


def backward(model, rows=3):
    model.zero_grad()
    model(torch.randn(rows, 6)).square().mean().backward()


def sequences(runs):
    """What was counted: sites, sums, sequence and steps of each run."""
    return [(r.sites, r.sums, r.sequence, steps) for r, steps in runs]


class Site:
    """One site of a training that is counted."""

    def __init__(self, rank, folder=None, ledger=None, **where):
        self.rank = rank
        file = None if folder is None else folder / f"ledger-{rank}.json"
        self.ledger = ledger or Ledger(DELTA, accountant="rdp", file=file)
        self.model, self.private = copy.deepcopy(MODEL), private_of(self.ledger)
        about = {"transform": self.private, "timeout": 10}
        self.session = og.distribute(self.model, og.Dense(), **where, **about)
        if folder is not None:
            saved = {"model": self.model, "ledger": self.ledger, "private": self.private}
            self.checkpoints = og.Checkpoints(folder / f"of-{rank}", self.session, **saved)

    def steps(self, count):
        for _ in range(count):
            backward(self.model)

    def discarded(self):
        """A step in which the backward of site 1 raises."""
        self.model.zero_grad()
        loss = self.model(torch.randn(3, 6)).square().mean()
        error = ArithmeticError if self.rank == 1 else og.StepDiscardedError
        with pytest.raises(error):
            Boom.apply(loss, self.rank == 1).backward()
        self.model.zero_grad()

    def end(self):
        told = self.session.privacy()
        self.session.detach()
        return told


# -- what counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("blind", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_epsilon_is_dp_accountings_over_all_that_may_happen(tmp_path, blind):
    """A step discarded within a band, a lost site; then a resume from a checkpoint before these."""

    def first(rank, transport, line):
        site = Site(rank, tmp_path, transport=transport)
        site.steps(3)
        site.checkpoints.save(3)
        site.discarded()
        site.steps(3)
        goes_on = goes_on_without_the_last(site.steps, rank == 2, line, further=5)
        return site.ledger.runs if goes_on else None

    def again(rank, transport, _):
        site = Site(rank, tmp_path, transport=transport)
        site.checkpoints.restore(allow_lost=True)
        site.steps(2)
        runs = site.ledger.runs
        return runs, site.end()

    sums = "masked" if blind else "trusted"
    one, other, _ = on_star_with_a_line(3, first, blind=blind)
    void = max(one[2].steps, other[2].steps)  # on a site that had begun it
    assert void in (3, 4)
    for runs, told in on_star_with_a_line(2, again, blind=blind):
        begun = 5 + void
        assert sequences(runs) == [
            (3, sums, "from 0", 4),
            (3, "open", "shown at 4", 1),
            (3, sums, "from 0", void),
            (2, sums, f"from {begun}", 5),
            (2, sums, f"from {begun + 5}", 2),
        ]
        # Turns of a part: 2 in 7 or 8 steps, 1 that was shown, 2 in 5 steps, and 1 in 2.
        seen = NOISE / math.sqrt(3)
        noises = {
            "model": [(NOISE, 6)],
            "site": [(NOISE * math.sqrt(2 / 3), 2), (seen, 1), (NOISE / math.sqrt(2), 3)],
            "hub": [(NOISE, 5), (seen, 1)] if blind else [(seen, 3), (NOISE / math.sqrt(2), 3)],
        }
        for observer, events in noises.items():
            assert told.epsilon[observer] == pytest.approx(by_hand(events), abs=1e-9)


def test_open_sums_count_alike_and_no_pass_of_no_sync():
    """A discarded step is no break: its part has had its turn, and nothing more is shown."""

    def body(rank, group):
        site = Site(rank, ledger=Ledger(DELTA), group=group)
        for _ in range(2):
            site.model.zero_grad()
            with site.session.no_sync():
                site.model(torch.randn(3, 6)).square().mean().backward()
            site.model(torch.randn(3, 6)).square().mean().backward()
        site.discarded()
        site.steps(2)
        runs, table = site.ledger.runs, str(site.ledger)
        return runs, table, site.end()

    for runs, table, told in run_on_lasting_groups(2, body):
        assert sequences(runs) == [(2, "open", "from 0", 5)]
        assert "5 x noise 1.6 in 4 bands" in table
        events = {"model": [(NOISE, 2)], "site": [(NOISE / math.sqrt(2), 2)]}
        for observer, noises in events.items():
            assert told.epsilon[observer] == pytest.approx(by_hand(noises, "pld"), abs=1e-9)


def test_each_shown_step_is_a_turn_of_its_own():
    """Two of them, of the same part: the row's turns are not those of successive steps."""

    def body(rank, transport):
        site = Site(rank, transport=transport)
        for _ in range(2):
            site.discarded()
            site.steps(3)
        return site.ledger.runs, site.end()

    for runs, told in on_star(3, body, {"blind": True}):
        shown = [one for one in sequences(runs) if one[1] == "open"]
        assert shown == [(3, "open", "shown at 1", 1), (3, "open", "shown at 6", 1)]
        noises = [(NOISE * math.sqrt(2 / 3), 2), (NOISE / math.sqrt(3), 2)]
        assert told.epsilon["site"] == pytest.approx(by_hand(noises), abs=1e-9)


def test_a_site_whose_backward_raised_has_drawn_as_many_numbers_as_the_others():
    """Else its noise would take back that of other steps than theirs."""

    class Counting:
        def __init__(self):
            self.drawn = 0

        def draw(self, count, device):
            self.drawn += count
            return torch.randn(count)

    def body(rank, group):
        site, source = Site(rank, group=group), Counting()
        object.__setattr__(site.private, "_source", source)
        site.steps(2)
        site.discarded()
        site.steps(1)
        site.session.detach()
        return source.drawn

    whole = sum(p.numel() for p in MODEL.parameters())
    assert run_on_lasting_groups(2, body) == [4 * whole, 4 * whole]


# -- sequences ------------------------------------------------------------------------------------


def test_sites_begin_a_sequence_together():
    """One is a new process; the others had gone on."""

    def body(rank, group):
        comm = og.TorchDistributed().open(torch.device("cpu"), group=group)
        sampling, ledger, banded = CyclicPoisson(RATE, PARTS), Ledger(DELTA), Banded(PARTS)
        counter = StepCounter(ledger, NOISE, sampling, 6.0, None, banded)
        for _ in range(3):
            counter.begin(comm)
        counter.restart()
        if rank == 1:
            ledger, banded = Ledger(DELTA), Banded(PARTS)
            counter = StepCounter(ledger, NOISE, sampling, 6.0, None, banded)
        else:
            counter._sequence = banded.sequence  # as if it had not heard of a restart
        for _ in range(2):
            counter.begin(comm)
        return sequences(ledger.runs), banded.sequence

    for runs, name in run_on_lasting_groups(2, body):
        assert runs == [(2, "open", "from 0", 3), (2, "open", "from 3", 2)]
        assert name == "from 3"


def test_a_restart_on_every_site_begins_a_sequence():
    def body(rank, group):
        site = Site(rank, group=group)
        site.steps(1)
        site.private.restart()
        site.steps(2)
        told = site.private.sequence, sequences(site.ledger.runs)
        return told, site.end()

    for (name, runs), told in run_on_lasting_groups(2, body):
        assert runs == [(2, "open", "from 0", 1), (2, "open", "from 1", 2)]
        assert name == "from 1"
        assert told.epsilon["model"] == pytest.approx(by_hand([(NOISE, 2)]), abs=1e-9)


def test_a_budget_stops_all_before_the_step_that_begins_another_turn():
    def body(rank, group):
        allowed = by_hand([(NOISE, 3)]) * 1.001
        site = Site(rank, ledger=Ledger(DELTA, accountant="rdp", stop_at=allowed), group=group)
        with pytest.raises(BudgetSpentError, match=r"in 4 bands, Poisson batches .* 4 parts"):
            site.steps(40)
        made = site.session.stats().private_steps
        site.session.detach()
        return made

    assert run_on_lasting_groups(2, body) == [3 * PARTS] * 2


# -- batches --------------------------------------------------------------------------------------


def loader_of(rows, rate=RATE):
    data, sampler = TensorDataset(torch.randn(rows, 6)), CyclicPoissonSampler(rows, rate, PARTS)
    return DataLoader(data, batch_sampler=sampler, collate_fn=CollateEmpty(data))


@pytest.mark.parametrize("batch", [6.0, 24.0])
def test_batch_is_what_the_loaders_draw_of_their_parts(batch):
    def body(rank, group):
        private = private_of(Ledger(DELTA), sampling=loader_of([100, 200][rank]), batch=batch)
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        try:
            backward(model)
        except ValueError as error:
            return str(error)
        finally:
            session.detach()
        return ""

    for error in run_on_lasting_groups(2, body):
        assert ("pass batch=6 on every site" in error) == (batch != 6.0)


REFUSED = {
    "poisson": ({"sampling": Poisson(RATE)}, r"CyclicPoissonSampler\(rows, rate, parts=4\)"),
    "parts": ({"sampling": CyclicPoisson(RATE, 3)}, "less than 4 steps apart"),
    "unit": ({"unit": "patient"}, "unit='patient'; use 'sample'"),
}


@pytest.mark.parametrize(("about", "said"), REFUSED.values(), ids=REFUSED)
def test_batches_that_bands_do_not_go_with_are_refused_at_once(about, said):
    with pytest.raises(ValueError, match=said):
        private_of(Ledger(DELTA), **about)


def test_a_loader_that_draws_of_all_rows_is_refused_at_once():
    data = TensorDataset(torch.randn(60, 6))
    loader = DataLoader(data, batch_sampler=PoissonSampler(60, 0.1), collate_fn=CollateEmpty(data))
    with pytest.raises(ValueError, match="less than 4 steps apart"):
        private_of(Ledger(DELTA), sampling=loader)
