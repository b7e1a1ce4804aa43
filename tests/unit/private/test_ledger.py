"""The ledger's ε is dp-accounting's, against each observer; a budget is never exceeded."""

from __future__ import annotations

import json
import math

import pytest

from outergrad.core import packages
from outergrad.private import BudgetSpentError, Fixed, Ledger, Poisson, Release
from outergrad.private.accounting import epsilon
from outergrad.private.observers import noise_seen

dp = pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
ADD = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp.NeighboringRelation.REPLACE_ONE
DELTA = 1e-5
STEP = Release(1.1, Poisson(0.01), sites=4, sums="masked")


def by_hand(accountant, event, relation=ADD):
    kinds = {"pld": dp.pld.PLDAccountant, "rdp": dp.rdp.RdpAccountant}
    return kinds[accountant](neighboring_relation=relation).compose(event).get_epsilon(DELTA)


def ledger_of(*runs, **kwargs):
    ledger = Ledger(DELTA, **kwargs)
    for release, steps in runs:
        ledger.record(release, steps)
    return ledger


def quick(**kwargs):
    return ledger_of(accountant="rdp", **kwargs)


def poisson(rate, noise):
    return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))


# -- the ε of dp-accounting -----------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_epsilon_is_that_of_the_composed_events(accountant):
    ledger = ledger_of(
        (Release(1.1, Poisson(0.01)), 300),
        (Release(0.9, Poisson(0.02)), 40),
        (Release(1.1, Poisson(0.01)), 200),
        (Release(20.0, Poisson(1.0)), 3),
    )
    event = dp.ComposedDpEvent(
        [
            dp.SelfComposedDpEvent(poisson(0.01, 1.1), 500),
            dp.SelfComposedDpEvent(poisson(0.02, 0.9), 40),
            dp.SelfComposedDpEvent(dp.GaussianDpEvent(20.0), 3),
        ]
    )
    found = ledger.epsilon(accountant=accountant)
    assert found == pytest.approx(by_hand(accountant, event), abs=1e-9)


@pytest.mark.parametrize(
    ("accountant", "adjacency", "sampling", "event", "relation"),
    [
        ("pld", "replace", Poisson(0.01), poisson(0.01, 4.0), REPLACE),
        ("pld", "replace", Fixed(5, 100), dp.GaussianDpEvent(2.0), ADD),
        ("pld", "add_or_remove", Fixed(5, 100), dp.GaussianDpEvent(2.0), ADD),
        ("rdp", "add_or_remove", Fixed(5, 100), dp.GaussianDpEvent(2.0), ADD),
        ("rdp", "replace", Fixed(5, 100, fresh=False), dp.GaussianDpEvent(2.0), ADD),
        (
            "rdp",
            "replace",
            Fixed(5, 100),
            dp.SampledWithoutReplacementDpEvent(100, 5, dp.GaussianDpEvent(2.0)),
            REPLACE,
        ),
    ],
)
def test_a_replaced_row_changes_twice_the_clip(accountant, adjacency, sampling, event, relation):
    """Noise 4 against 2C is noise 2 against C, in dp-accounting's terms of each accountant."""
    ledger = ledger_of((Release(4.0, sampling), 20), accountant=accountant, adjacency=adjacency)
    event = dp.SelfComposedDpEvent(event, 20)
    assert ledger.epsilon() == pytest.approx(by_hand(accountant, event, relation), abs=1e-9)


def test_one_gaussian_release_is_what_theory_says():
    """Balle and Wang, arXiv 1805.06530, Theorem 8, solved for δ."""

    def normal(x):
        return math.erfc(-x / math.sqrt(2)) / 2

    found = ledger_of((Release(3.0, Poisson(1.0)), 1)).epsilon()
    half, eps = 1 / 6, 3.0 * found
    delta = normal(half - eps) - math.exp(found) * normal(-half - eps)
    assert delta == pytest.approx(DELTA, rel=1e-3)


SETTINGS = [
    (1.1, 0.01, 1000, 1e-5),
    (0.8, 0.01, 500, 1e-5),
    (0.7, 0.005, 2000, 1e-6),
    (1.5, 0.05, 400, 1e-5),
    (2.0, 0.1, 300, 1e-5),
    (4.0, 0.2, 1000, 1e-6),
    (1.0, 0.001, 20000, 1e-7),
    (1.3, 0.004, 6000, 1e-5),
    (10.0, 1.0, 50, 1e-5),
    (0.6, 0.002, 100, 1e-4),
]


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS)
def test_another_accountant_agrees(noise, rate, steps, delta):
    analysis = pytest.importorskip("opacus.accountants.analysis.rdp", reason="pip install opacus")
    orders = dp.rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
    rdp = analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=orders)
    theirs, _ = analysis.get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
    ours = epsilon({(noise, Poisson(rate)): steps}, delta, accountant="rdp")
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sampling", [Poisson, lambda rate: Fixed(int(1000 * rate), 1000)])
def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise_and_delta(accountant, sampling):
    def of(noise=4.0, rate=0.01, steps=20, delta=DELTA):
        adjacency = (
            "replace" if accountant == "rdp" and sampling is not Poisson else "add_or_remove"
        )
        spent = {(noise, sampling(rate)): steps}
        return epsilon(spent, delta, accountant=accountant, adjacency=adjacency)

    assert 0 < of() < of(steps=25)
    assert of(noise=5.0) < of() < of(noise=3.0)
    assert of(delta=1e-4) < of() < of(delta=1e-6)
    if accountant == "rdp" or sampling is Poisson:
        assert of(rate=0.005) < of() < of(rate=0.02)
    else:  # nothing is amplified
        assert of(rate=0.005) == of()


def test_pld_is_no_looser_than_rdp_and_given_up_far_out():
    ledger = ledger_of((STEP, 500))
    assert ledger.epsilon(accountant="pld") < ledger.epsilon(accountant="rdp")
    ledger = ledger_of((Release(1.0, Poisson(1.0)), 1000))
    assert ledger.epsilon(accountant="rdp") > 100
    assert ledger.epsilon(accountant="pld") == math.inf


def test_no_noise_is_no_privacy():
    assert ledger_of((Release(0.0, Poisson(0.01)), 1)).epsilon() == math.inf


# -- observers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sites", [2, 3, 4, 9])
def test_observers_are_ordered(sites):
    def of(observer, sums, **kwargs):
        release = Release(1.5, Poisson(0.01), sites=sites, sums=sums)
        return ledger_of((release, 400), accountant="rdp", **kwargs).epsilon(observer)

    model, masked, open_ = of("model", "masked"), of("site", "masked"), of("site", "open")
    assert model < masked <= open_
    assert (masked == open_) == (sites == 2)
    assert of("site", "trusted") == masked
    assert of("model", "open") == of("model", "trusted") == of("hub", "masked") == model
    assert of("hub", "trusted") == of("hub", "open") == open_
    together = [of("site", "masked", colluding=t) for t in range(1, sites)]
    assert together == sorted(together)
    assert together[-1] == pytest.approx(open_, rel=1e-12)


def test_what_is_left_of_noise_that_is_known_in_part():
    """The variance of a sum of four, of which the observer has added one."""
    assert noise_seen(2.0, "site", sites=4, sums="masked") == pytest.approx(math.sqrt(3))
    assert noise_seen(2.0, "site", sites=4, sums="open") == 1.0
    assert noise_seen(2.0, "model", sites=4, sums="open") == 2.0


# -- budgets --------------------------------------------------------------------------------------


def train(ledger, release, most=10_000):
    """Steps until the budget is spent."""
    for _ in range(most):
        ledger.check(release)
        ledger.record(release)


@pytest.mark.parametrize("stop_at", [0.4, 1.0, 1.7])
def test_a_budget_ends_before_the_step_that_would_exceed_it(stop_at):
    ledger = quick(stop_at=stop_at)
    with pytest.raises(BudgetSpentError, match="end the training here, on all sites") as raised:
        train(ledger, STEP)
    assert raised.value.steps == ledger.steps
    assert raised.value.spent == ledger.epsilon() <= stop_at
    ledger.record(STEP)
    assert ledger.epsilon() > stop_at


def test_all_sites_stop_at_the_same_step_with_the_same_words():
    first, second = quick(stop_at=1.0), quick(stop_at=1.0)
    second.load_state_dict(ledger_of((STEP, 123)).state_dict())
    first.record(STEP, 123)
    said = []
    for ledger in (first, second):
        with pytest.raises(BudgetSpentError) as raised:
            train(ledger, STEP)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_budget_of_pld_lasts_longer():
    loose = quick(stop_at=0.4)
    with pytest.raises(BudgetSpentError):
        train(loose, STEP)
    tight = ledger_of((STEP, loose.steps), stop_at=0.4)
    tight.check(STEP)


def test_a_budget_counts_other_runs_and_steps_that_nobody_checked():
    ledger = quick(stop_at=1.0)
    ledger.check(STEP)
    other = Release(0.7, Poisson(0.02), sites=4, sums="masked")
    ledger.record(STEP, 40)
    ledger.check(STEP)
    ledger.record(other, 400)
    for release in (STEP, other):
        with pytest.raises(BudgetSpentError):
            ledger.check(release)


def test_a_budget_is_against_whom_it_says():
    model, site = quick(stop_at=1.2), quick(stop_at=1.2, against="site")
    for ledger in (model, site):
        with pytest.raises(BudgetSpentError):
            train(ledger, STEP)
    assert site.steps < model.steps
    assert site.epsilon("site") <= 1.2 < model.epsilon("site")


def test_most_checks_compute_nothing(monkeypatch):
    ledger, computed = quick(stop_at=1.0), []
    compute = ledger._epsilon
    monkeypatch.setattr(ledger, "_epsilon", lambda *a: computed.append(a) or compute(*a))
    with pytest.raises(BudgetSpentError):
        train(ledger, STEP)
    assert len(computed) < 30 < ledger.steps


def test_without_a_budget_nothing_is_asked_of_a_step(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    train(Ledger(DELTA), STEP, most=5)


# -- counting and state ---------------------------------------------------------------------------


def test_equal_releases_are_counted_together():
    ledger = ledger_of((STEP, 1), (STEP, 2), (Release(2.0, Fixed(3, 9)), 1), (STEP, 0), (STEP, 5))
    assert [(run.release.noise, run.steps) for run in ledger.runs] == [(1.1, 3), (2.0, 1), (1.1, 5)]
    assert ledger.steps == 9


def test_a_ledger_goes_on_where_another_ended():
    whole = ledger_of((STEP, 30), (Release(2.0, Fixed(3, 9, fresh=False), 2, "open"), 12))
    state = json.loads(json.dumps(whole.state_dict()))
    other = Ledger(DELTA)
    other.load_state_dict(state)
    assert other.runs == whole.runs
    for ledger in (whole, other):
        ledger.record(STEP, 7)
    assert other.state_dict() == whole.state_dict()
    assert other.epsilon(accountant="rdp") == whole.epsilon(accountant="rdp")


def test_what_was_released_since_a_checkpoint_stays_released():
    ledger = ledger_of((STEP, 30))
    checkpoint = ledger.state_dict()
    ledger.record(STEP, 5)
    ledger.record(Release(2.0, Poisson(0.5)))
    counted = ledger.runs
    ledger.load_state_dict(checkpoint)
    ledger.load_state_dict(Ledger(DELTA).state_dict())
    assert ledger.runs == counted


def test_a_file_keeps_what_was_released(tmp_path):
    file = tmp_path / "ledger.json"
    ledger = ledger_of((STEP, 30), file=file)
    checkpoint = ledger.state_dict()
    ledger.record(STEP, 5)
    restarted = Ledger(DELTA, file=file)
    restarted.load_state_dict(checkpoint)
    assert restarted.runs == ledger.runs


def test_a_release_that_cannot_be_written_down_is_not_counted(tmp_path):
    ledger = Ledger(DELTA, file=tmp_path / "nowhere" / "ledger.json")
    with pytest.raises(OSError, match="nowhere"):
        ledger.record(STEP)
    assert ledger.steps == 0


def test_it_can_be_read_by_a_person():
    said = str(ledger_of((STEP, 400), (Release(9.0, Fixed(3, 900), 4, "open"), 1)))
    assert "ε at δ = 1e-05, one row more or less, after 401 released steps" in said
    whom = ["whoever gets the model", "another site", "the hub"]
    rows = [line for name in whom for line in said.splitlines() if line.startswith(name)]
    values = [[float(cell) for cell in row.split()[-2:]] for row in rows]
    assert len(values) == 3
    assert all(0 < pld <= rdp for pld, rdp in values)
    assert "400 x noise 1.1, Poisson batches at rate 0.01, 4 sites, sums masked" in said
    assert "1 x noise 9, batches of 3 of 900 rows, drawn anew, 4 sites, messages open" in said


# -- refusals -------------------------------------------------------------------------------------

REFUSED = {
    "delta": (lambda: Ledger(1.0), "delta must be between 0 and 1"),
    "stop_at": (lambda: Ledger(DELTA, stop_at=0.0), "stop_at must be above 0"),
    "against": (lambda: Ledger(DELTA, against="me"), "against must be one of model, site, hub"),
    "accountant": (lambda: Ledger(DELTA, accountant="moments"), "accountant must be 'pld' or"),
    "adjacency": (lambda: Ledger(DELTA, adjacency="user"), "adjacency must be one of add_or"),
    "colluding": (lambda: Ledger(DELTA, colluding=0), "colluding must be 1 or more"),
    "noise": (lambda: Release(-1.0, Poisson(0.1)), "noise must be 0 or more"),
    "NaN": (lambda: Release(math.nan, Poisson(0.1)), "noise must be 0 or more"),
    "sampling": (lambda: Release(1.0, 0.1), "sampling must be Poisson"),
    "sites": (lambda: Release(1.0, Poisson(0.1), sites=0), "sites must be 1 or more"),
    "sums": (lambda: Release(1.0, Poisson(0.1), sums="secret"), "sums must be one of masked"),
    "rate": (lambda: Poisson(0.0), "rate must be above 0"),
    "size": (lambda: Fixed(10, 9), "size must be from 1 to rows=9"),
    "steps": (lambda: Ledger(DELTA).record(STEP, -1), "steps must be 0 or more"),
    "observer": (lambda: ledger_of((STEP, 1)).epsilon("me"), "observer must be one of model"),
    "one site": (
        lambda: ledger_of((Release(1.0, Poisson(0.1)), 1)).epsilon("site"),
        "there is one site, and no other",
    ),
    "colluders": (
        lambda: ledger_of((STEP, 1), colluding=4).epsilon("site"),
        "colluding=4: somebody must be left to look at; pass colluding= from 1 to 3",
    ),
    "Poisson, replaced, RDP": (
        lambda: ledger_of((STEP, 1), accountant="rdp", adjacency="replace").epsilon(),
        "no bound by RDP: pass accountant='pld'",
    ),
    "other releases": (
        lambda: ledger_of((STEP, 3)).load_state_dict(
            ledger_of((Release(2.0, Poisson(0.1)), 9)).state_dict()
        ),
        r"other releases \(9 steps in 1 runs\) than this ledger \(3 steps in 1 runs\)",
    ),
    "no state": (lambda: Ledger(DELTA).load_state_dict({"model": 3}), "no state of a ledger"),
}


@pytest.mark.parametrize(("act", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_a_remedy(act, said):
    with pytest.raises(ValueError, match=said):
        act()


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json' holds no ledger"):
        Ledger(DELTA, file=tmp_path / "a.json")


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: False)
    ledger = ledger_of((STEP, 3))
    with pytest.raises(ImportError, match=r"pip install 'dp-accounting>=0\.6'"):
        ledger.epsilon()
    assert "pip install 'dp-accounting>=0.6'" in str(ledger)


def test_a_version_that_counts_replaced_rows_once_is_refused(monkeypatch):
    monkeypatch.setattr("outergrad.private.accounting.version", lambda name: "0.4.4")
    with pytest.raises(ImportError, match=r"dp-accounting 0\.4\.4 counts a replaced row once"):
        ledger_of((STEP, 3)).epsilon()
