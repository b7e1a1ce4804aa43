"""Fragments that take turns, and exchanges that travel while the sites go on."""

from __future__ import annotations

import copy
import io
import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import Events, mlp, relative_error
from covering import covering
from meshes import run_mesh
from outergrad.optim import OuterMuon
from outergrad.session.fragments import Fragments
from ranks import run_on_lasting_groups, try_ranks
from sites_apart import FULL_RANK, INNER, LOW_RANK, Site, loss, model, nesterov, plain, train

PARTS = {
    1: [["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]],
    2: [["2.weight", "0.bias", "2.bias", "4.bias"], ["0.weight", "4.weight"]],
    3: [["2.weight"], ["0.weight", "4.bias"], ["4.weight", "0.bias", "2.bias"]],
}
"""Of the model of `sites_apart`: 94 and 94 numbers, or 72, 59 and 57."""
TURNS = [
    (2, {"k": 4, "stream": 2}, plain),
    (3, {"k": 6, "stream": 3}, nesterov),
    (2, {"k": 3, "stream": 3, "alpha": 0.25}, nesterov),
    (2, {"k": 4, "stream": 1, "overlap": 2}, plain),
    (2, {"k": 6, "stream": 2, "overlap": 2}, nesterov),
    (3, {"k": 4, "stream": 2, "overlap": 1, "alpha": 0}, nesterov),
    (3, {"k": 9, "stream": 3, "overlap": 1, "alpha": 0.75}, nesterov),
    (2, {"k": 3, "stream": 3}, OuterMuon),
]


def hidden_matrices(params):
    """Returns `OuterMuon` that is told which of the parameters are the two hidden matrices."""
    hidden = [params[0], params[2]]
    others = [p for p in params if all(p is not q for q in hidden)]
    return OuterMuon([{"params": hidden, "matrices": True}, {"params": others, "matrices": False}])


IN_FORMULA = {OuterMuon: hidden_matrices}
"""What the formula takes in place of an outer optimizer that groups by the model."""


class Formula:
    """Streaming DiLoCo in float64 (arXiv 2501.18512, algorithm 2): every local step counts once.

    Sites count by `weights(rank, number)` in every step, summed up over those of a change.
    """

    def __init__(self, sites, k, stream=1, overlap=0, alpha=None, outer=nesterov, weights=None):
        self.period, self.overlap, self.parts = k // stream, overlap, PARTS[stream]
        self.alpha = (0.5 if overlap else 0.0) if alpha is None else alpha
        self.start = dict(model().double().named_parameters())
        self.sites = [model().double() for _ in range(sites)]
        self.inner = [INNER["momentum"](net.parameters()) for net in self.sites]
        self.outer = IN_FORMULA.get(outer, outer)(list(self.start.values()))
        self.weights = weights or (lambda rank, number: 1)
        self.counted = [[0] * sites for _ in self.parts]
        self.moved = [dict.fromkeys(self.start, 0.0) for _ in range(sites)]
        self.turn, self.sent, self.differing = 0, None, set()

    def steps(self, first, stop):
        for number in range(first, stop):
            for rank in range(len(self.sites)):
                self.step(rank, number)
            if self.sent is not None and (number + 1) % self.period == self.overlap:
                self.arrive(self.alpha)
            if (number + 1) % self.period == 0:
                self.send()
                if not self.overlap:
                    self.arrive(self.alpha)
        return self

    def step(self, rank, number):
        net, before = self.sites[rank], copy.deepcopy(self.sites[rank])
        train(net, [self.inner[rank]], rank, [number])
        for (name, p), q in zip(net.named_parameters(), before.parameters(), strict=True):
            self.moved[rank][name] += (q - p).detach()
        for counts in self.counted:
            counts[rank] += self.weights(rank, number)
        self.differing = set(range(len(self.parts)))

    def send(self):
        counts = self.counted[self.turn]
        whole = sum(counts)
        shares = [n / whole if whole else 1 / len(counts) for n in counts]
        self.sent = {}
        for name in self.parts[self.turn]:
            pairs = zip(shares, self.moved, strict=True)
            self.sent[name] = sum(share * moved.pop(name) for share, moved in pairs)
            for moved in self.moved:
                moved[name] = torch.zeros_like(self.start[name])
        self.counted[self.turn] = [0] * len(self.sites)

    @torch.no_grad()
    def arrive(self, alpha):
        for name, p in self.start.items():
            p.grad = self.sent.get(name)
        self.outer.step()
        for net in self.sites:
            for name in self.sent:
                own = dict(net.named_parameters())[name]
                own.copy_(alpha * own + (1 - alpha) * self.start[name])
        if not alpha and not any(self.counted[self.turn]):
            self.differing.discard(self.turn)
        self.turn, self.sent = (self.turn + 1) % len(self.parts), None

    def flush(self):
        if self.sent is not None:
            self.arrive(self.alpha)
        for _ in self.parts:
            if self.turn in self.differing:
                self.send()
                self.arrive(0.0)
            else:
                self.turn = (self.turn + 1) % len(self.parts)


def method_of(turns, **more):
    return og.LocalSteps(turns["k"], **{k: v for k, v in turns.items() if k != "k"}, **more)


def assert_close(net, expected, limit=1e-5):
    for (name, p), q in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) < limit, name


@pytest.mark.parametrize(("sites", "turns", "outer"), TURNS, ids=[f"{s}: {t}" for s, t, _ in TURNS])
def test_it_is_streaming_diloco(sites, turns, outer):
    """The weights of every site after every step, and behind a flush."""
    stop = 2 * turns["k"] + 1

    def body(rank, group):
        site = Site(method_of(turns, outer=outer), rank, group, "momentum")
        found = [copy.deepcopy(site.steps(n, n + 1).model) for n in range(stop)]
        site.session.flush()
        found.append(copy.deepcopy(site.model))
        site.session.detach()
        return found

    by_site, formula = run_on_lasting_groups(sites, body), Formula(sites, **turns, outer=outer)
    for number in range(stop + 1):
        formula.steps(number, number + 1) if number < stop else formula.flush()
        for found, expected in zip(by_site, formula.sites, strict=True):
            assert_close(found[number], expected)
    for found in by_site[1:]:
        for p, q in zip(found[-1].parameters(), by_site[0][-1].parameters(), strict=True):
            assert p.equal(q)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("name", FULL_RANK)
def test_with_every_method_of_full_rank(name, overlap):
    turns = {"k": 4, "stream": 2, "overlap": overlap}

    def body(rank, group):
        site = Site(
            method_of(turns, outer=og.nesterov, method=FULL_RANK[name]), rank, group, "momentum"
        )
        site.steps(0, 9).session.detach()
        return site.model

    found = run_on_lasting_groups(2, body)
    for net, expected in zip(found, Formula(2, **turns).steps(0, 9).sites, strict=True):
        assert_close(net, expected)


def test_samples_are_those_of_all_steps_of_a_change():
    def weights(rank, number):
        return 1 + (3 * number + 2 * rank) % 5

    def body(rank, group):
        method = og.LocalSteps(4, outer=og.nesterov, stream=2)
        site = Site(method, rank, group, "momentum", weighting="samples")
        for number in range(11):
            site.session.samples(weights(rank, number))
            site.steps(number, number + 1)
        site.session.flush()
        site.session.detach()
        return site.model

    formula = Formula(2, 4, 2, weights=weights).steps(0, 11)
    formula.flush()
    for net in run_on_lasting_groups(2, body):
        assert_close(net, formula.sites[0])


@pytest.mark.parametrize("name", LOW_RANK)
def test_a_fragment_is_equal_to_the_bit_when_it_is_exchanged(name):
    """And differs between: nothing of the other fragments travels."""

    def body(rank, group):
        site = Site(og.LocalSteps(4, method=LOW_RANK[name], stream=2), rank, group)
        found = [copy.deepcopy(site.steps(n, n + 1).model) for n in range(8)]
        site.session.detach()
        return found

    for number, (ours, theirs) in enumerate(zip(*run_on_lasting_groups(2, body), strict=True)):
        own = dict(theirs.named_parameters())
        same = {name for name, p in ours.named_parameters() if p.equal(own[name])}
        assert same == (set(PARTS[2][number // 2 % 2]) if number % 2 else set())


SIGNS = og.Sparse(density=0.4, select="random_blocks", block=4, wire=og.wire.Sign(), always=True)
RESET = [
    {"k": 1, "error_reset": True},
    {"k": 4, "stream": 2, "error_reset": True},
    {"k": 4, "overlap": 2, "alpha": 0.0, "error_reset": True},
    {"k": 3, "stream": 3, "alpha": 0.5, "error_reset": True},
]


@pytest.mark.parametrize(
    "turns",
    [{"k": 4, "stream": 2}, {"k": 4, "overlap": 2}, {"k": 3, "stream": 3, "alpha": 0.5}, *RESET],
)
@pytest.mark.parametrize(
    "low", [og.RankDAD(rank=1, error_feedback="dense"), SIGNS], ids=["rank-dad", "signs"]
)
def test_every_step_of_a_site_is_applied_or_owed_once(turns, low):
    """However it was moved by exchanges: what is left out is in no place twice."""

    def body(rank, group):
        site = Site(method_of(turns, outer=plain, method=low), rank, group)
        own, owed = dict.fromkeys(PARTS[1][0], 0.0), {}
        for number in range(11):
            site.steps(number, number + 1)
            for name, p in site.model.named_parameters():
                own[name] = own[name] + 0.1 * p.grad.double()
        site.session.flush()
        for compressor in site.session.state_dict()["exchanges"]:
            owed |= {n: m["unsent"] for n, m in compressor["own"]["memories"].items()}
        site.session.detach()
        return own, owed, dict(site.model.named_parameters())

    results = run_on_lasting_groups(2, body)
    for name, before in model().named_parameters():
        wanted = sum(own[name] for own, _, _ in results)
        if name.endswith("weight"):
            left_out = sum(owed[name].view_as(before) for _, owed, _ in results)
            assert left_out.norm() > 1e-3
            wanted = wanted - left_out
        for _, _, now in results:
            change = (before - now[name]).detach().double()
            torch.testing.assert_close(change, wanted / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", ["momentum", "muon"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", ["rank-dad", "powersgd", "sparse", "signs"])
def test_a_site_keeps_what_it_has_not_sent(name, k, inner):
    """CSER: behind an exchange its weights are the shared ones and its own unsent change."""
    whole = og.RankDAD(rank=1, error_feedback="dense")
    low = {**LOW_RANK, "rank-dad": whole, "signs": SIGNS}[name]

    def body(rank, group):
        method = og.LocalSteps(k, outer=plain, method=low, error_reset=True)
        site = Site(method, rank, group, inner).steps(0, 6)
        state = site.session.state_dict()
        (compressor,) = state["exchanges"]
        owed = {n: m["unsent"] for n, m in compressor["own"]["memories"].items()}
        shared = state["local_steps"]["start"]
        for name, p in site.model.named_parameters():
            kept = owed[name].view_as(p) if name in owed else torch.zeros_like(p)
            assert (kept.norm() > 1e-4) == name.endswith("weight"), name
            torch.testing.assert_close(p.detach(), shared[name] - kept)
        site.session.flush()
        site.session.detach()
        return list(shared.values()), site.weights()

    (ours, ours_end), (theirs, theirs_end) = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, ours_end, theirs_end))


FLUSHED = {
    **{f"{name}, reset": (low, {"k": 2, "error_reset": True}) for name, low in LOW_RANK.items()},
    "signs, reset": (replace(SIGNS, vectors=og.wire.Sign()), {"k": 2, "error_reset": True}),
    "signs": (SIGNS, {"k": 2}),
    "signs, two ways": (replace(SIGNS, reduce="two_way"), {"k": 2, "error_reset": True}),
    "signs, streams": (SIGNS, {"k": 4, "stream": 2, "error_reset": True}),
    "signs, overlap": (SIGNS, {"k": 4, "overlap": 1, "error_reset": True}),
}


@pytest.mark.parametrize("steps", [6, 7])
@pytest.mark.parametrize("name", FLUSHED)
def test_a_whole_flush_leaves_nothing_owed(name, steps):
    """The weights are then what they were at first, less the mean of all steps of the sites."""
    low, turns = FLUSHED[name]
    if isinstance(low, og.RankDAD):
        low = replace(low, error_feedback="dense")  # which remembers all of it

    def body(rank, group):
        site = Site(method_of(turns, outer=plain, method=low), rank, group)
        own = dict.fromkeys(PARTS[1][0], 0.0)
        for number in range(steps):
            site.steps(number, number + 1)
            for name, p in site.model.named_parameters():
                own[name] = own[name] + 0.1 * p.grad.double()
        site.session.flush(whole=True)
        assert not site.session._exchange.compressors.owe
        before = site.weights()
        site.session.flush()
        assert all(map(torch.equal, before, site.weights()))
        site.steps(steps, steps + 4)  # and training goes on
        site.session.detach()
        return own, before

    results = run_on_lasting_groups(2, body)
    for number, (name, before) in enumerate(model().named_parameters()):
        wanted = before.detach().double() - sum(own[name] for own, _ in results) / 2
        for _, now in results:
            torch.testing.assert_close(now[number].double(), wanted, rtol=1e-4, atol=2e-6)


def test_after_a_flush_a_whole_one_brings_the_rest():
    flushed_alike(lambda session, rank: (session.flush(), session.flush(whole=True)))


def test_one_site_that_asks_is_enough_where_changes_are_left():
    flushed_alike(lambda session, rank: session.flush(whole=rank == 1))


def flushed_alike(flush):
    """Nothing is owed behind it, and the sites have the same weights."""

    def body(rank, group):
        site = Site(og.LocalSteps(2, outer=plain, method=SIGNS, error_reset=True), rank, group)
        site.steps(0, 5)
        assert site.session._exchange.compressors.owe
        flush(site.session, rank)
        assert not site.session._exchange.compressors.owe
        site.session.detach()
        return site.weights()

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, ours, theirs))


def test_a_whole_flush_counts_what_sites_owe_alike_without_new_samples():
    """Where sites weigh by samples, and all are without any since the last exchange."""

    def body(rank, group):
        net, method = model(), og.LocalSteps(2, outer=plain, method=SIGNS, error_reset=True)
        session = og.distribute(net, method, group=group, weighting="samples")
        train(net, [INNER["sgd"](net.parameters())], rank, range(5))
        session.flush()
        (state,) = session.state_dict()["exchanges"]
        owed = {n: m["unsent"].double() for n, m in state["own"]["memories"].items()}
        before = copy.deepcopy(net)
        session.flush(whole=True)
        assert not session._exchange.compressors.owe
        session.detach()
        return before, owed, net

    results = run_on_lasting_groups(2, body)
    for name, p in results[0][0].named_parameters():
        due = [owed[name].view_as(p) for _, owed, _ in results if name in owed]
        wanted = p.detach().double() - sum(due) / 2 if due else p.detach().double()
        for _, _, after in results:
            found = dict(after.named_parameters())[name].detach().double()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_a_site_that_owes_nothing_flushes_with_the_others():
    low = og.RankDAD(rank=1)

    def body(rank, group):
        method = og.LocalSteps(2, outer=plain, method=low, error_reset=True)
        site = Site(method, rank, group)
        if rank == 1:
            site.session._updates.outer._owed = dict
        site.steps(0, 4).session.flush()
        site.session.detach()
        return site.weights(), site.session.stats().step

    (ours, exchanges), (theirs, _) = run_on_lasting_groups(2, body)
    assert exchanges == 3
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("turns", [{"k": 3, "alpha": 0.5}, {"k": 4, "overlap": 1}, {"k": 4}])
def test_a_flush_begins_anew(turns):
    """What was shared by then is not sent a second time."""

    def body(rank, group):
        site = Site(method_of(turns, outer=plain), rank, group).steps(0, 5)
        site.session.flush()
        before = site.weights()
        site.steps(5, 6)
        own = [0.1 * p.grad for p in site.model.parameters()]
        site.session.flush()
        site.session.detach()
        return before, own, site.weights()

    (before, own, now), (_, theirs, _) = run_on_lasting_groups(2, body)
    for p, one, other, q in zip(before, own, theirs, now, strict=True):
        torch.testing.assert_close(q, p - (one + other) / 2)


# -- bytes ---------------------------------------------------------------------------------------

WIDE = mlp(64, 64, 64, 64, 64)


def sent_bytes(method, exchanges):
    """Of each exchange, on one site."""

    def body(rank, group):
        torch.manual_seed(rank)
        net = copy.deepcopy(WIDE)
        session = og.distribute(net, method, group=group)
        optimizer, found = SGD(net.parameters(), lr=0.1), []
        while len(found) < exchanges:
            net(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            if session.stats().step > len(found):
                found.append(session.stats().sent_bytes)
        session.detach()
        return found

    return run_on_lasting_groups(2, body)[0]


@pytest.mark.parametrize("method", [og.Dense(), og.RankDAD(rank=2)], ids=["dense", "rank-dad"])
def test_turns_send_as_much_and_never_a_burst(method):
    *_, whole = sent_bytes(og.LocalSteps(4, method=method), 4)
    parts = sent_bytes(og.LocalSteps(4, method=method, stream=4), 16)[-4:]
    overhead = 600  # bytes: a preamble, and a vote in some steps
    assert whole - overhead < sum(parts) < whole + 4 * overhead
    assert max(parts) < whole / 4 + overhead


@pytest.mark.parametrize("budget", [6_000, 1 / 8])
def test_a_budget_is_of_the_exchange_of_a_fragment(budget):
    method = og.RankDAD(budget=budget, wire=og.wire.Int4(), error_feedback="dense")
    nbytes = budget if budget > 1 else budget * 4 * 64 * 65
    found = sent_bytes(og.LocalSteps(4, method=method, stream=4), 16)
    assert max(found) <= nbytes
    assert min(found[-4:]) > nbytes / 2


# -- saved and loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "saved_after"),
    covering(
        [
            "dense",
            "budget",
            "owners",
            "error reset",
            "owners, reset",
            "reset, muon",
            "signs, muon",
            "in turn, muon",
        ],
        range(6, 10),
        quick=4,
        every=2,
    ),
)
def test_training_goes_on_to_the_bit(name, saved_after):
    """From every place in a round, also while an exchange is under way; saving changes nothing."""
    few = og.RankDAD(budget=3_000, wire=og.wire.Int4(), error_feedback="dense")
    by_owners = replace(few, budget=5_000, reduce="two_way")
    method = {
        "dense": og.LocalSteps(6, stream=2, overlap=2),
        "budget": og.LocalSteps(6, method=few, stream=2, overlap=2),
        "owners": og.LocalSteps(6, method=by_owners, stream=2, overlap=2),
        "error reset": og.LocalSteps(2, method=few, error_reset=True),
        "owners, reset": og.LocalSteps(2, method=by_owners, error_reset=True),
        "reset, muon": og.LocalSteps(1, method=few, error_reset=True),
        "signs, muon": og.LocalSteps(
            2, method=replace(SIGNS, vectors=og.wire.Sign()), error_reset=True
        ),
        "in turn, muon": og.LocalSteps(
            3, stream=3, outer=OuterMuon, method=replace(SIGNS, density=1.0), error_reset=True
        ),
    }[name]
    inner = "muon" if "muon" in name else "momentum"

    def body(rank, group):
        whole = Site(method, rank, group, inner).steps(0, 14)
        saved = Site(method, rank, group, inner).steps(0, saved_after)
        parts = (saved.model, saved.optimizer, saved.session)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        saved.steps(saved_after, 14)
        again = Site(method, rank, group, inner)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again.model, again.optimizer, again.session), states, strict=True):
            part.load_state_dict(state)
        again.steps(saved_after, 14)
        for site in (whole, saved, again):
            site.session.flush()
            site.session.detach()
        assert again.session.stats().step == whole.session.stats().step
        for other in (saved, again):
            for ours, theirs in zip(whole.weights(), other.weights(), strict=True):
                assert ours.equal(theirs)

    run_on_lasting_groups(3 if "owners" in name else 2, body)


@pytest.mark.parametrize("inner", ["sgd", "muon"])
def test_another_number_of_sites_goes_on_from_a_flush(inner):
    method = og.LocalSteps(4, method=og.RankDAD(rank=1), stream=2, overlap=1)

    def save(rank, group):
        site = Site(method, rank, group, inner).steps(0, 7)
        site.session.flush()
        return site.session.state_dict(), site.model.state_dict()

    states, models = zip(*run_on_lasting_groups(2, save), strict=True)

    def go_on(rank, group):
        site = Site(method, rank, group, inner)
        site.model.load_state_dict(models[0])
        site.session.load_state_dict(list(states))
        site.steps(7, 12).session.flush()
        site.session.detach()
        return site.weights()

    first, *others = run_on_lasting_groups(3, go_on)
    for other in others:
        assert all(map(torch.equal, first, other))


# -- while an exchange travels -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dense", "rank-dad", "sparse"])
def test_nobody_waits_for_a_site_that_is_late(name):
    """A site sends, and makes two more steps, before the other one has made its step at all."""
    method = og.LocalSteps(3, method={"dense": og.Dense(), **LOW_RANK}[name], overlap=2)
    ahead = threading.Event()

    def body(rank, group):
        site = Site(method, rank, group).steps(0, 11)
        if rank == 1:
            assert ahead.wait(10), "site 0 waits for site 1"
        site.steps(11, 13)
        if rank == 0:
            ahead.set()
        site.steps(13, 15).session.detach()
        return site.session.stats().step

    assert run_on_lasting_groups(2, body) == [5, 5]


def test_what_is_under_way_comes_before_all_else():
    """Another session of the group, replicas that are compared, what is saved: nothing mixes."""
    method = og.LocalSteps(6, stream=2, overlap=2)

    def body(rank, group):
        quiet = Site(method, rank, group, "momentum").steps(0, 11)
        site = Site(method, rank, group, "momentum", verify_every=1)
        other = model()
        shared = og.distribute(other, og.DAD(), group=group)
        for number in range(11):
            site.steps(number, number + 1)
            loss(other(torch.ones(2, 6) * (number + rank))).backward()
            if number % 3 == 0:
                site.session.state_dict()
        late = og.distribute(model(), og.DAD(), group=group)
        for session in (late, shared, site.session, quiet.session):
            session.detach()
        assert all(map(torch.equal, site.weights(), quiet.weights()))
        return [p.grad for p in other.parameters()]

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(map(torch.equal, ours, theirs))


def test_a_lost_site_is_noticed_when_its_change_is_to_be_applied():
    def body(rank, group):
        site = Site(og.LocalSteps(2, overlap=1), rank, group).steps(0, 5)
        if rank == 0:
            site.steps(5, 6)
            with pytest.raises(og.SiteLostError, match="lost site 1"):
                site.steps(6, 7)
            with pytest.raises(og.SiteLostError, match="lost site 1"):
                site.session.state_dict()

    assert try_ranks(2, body, timedelta(seconds=2)) == [None, None]


def test_a_changed_model_is_told_of_the_fragment_that_is_due():
    def body(rank, group):
        site = Site(og.LocalSteps(4, stream=2), rank, group).steps(0, 3)
        if rank == 1:
            site.model[0].weight = nn.Parameter(torch.zeros(9, 6))
        with pytest.raises(RuntimeError, match=r"'0\.weight'|has changed"):
            site.steps(3, 5)
        site.session.detach()

    assert try_ranks(2, body, timedelta(seconds=5)) == [None, None]


# -- sites of several ranks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns", [{"stream": 2}, {"overlap": 1}, {"stream": 2, "overlap": 1, "alpha": 0.25}], ids=str
)
def test_sites_of_several_ranks_take_turns(turns):
    def body(mesh):
        net = model()
        session = og.distribute(net, og.LocalSteps(4, outer=og.nesterov, **turns), mesh=mesh)
        train(net, [INNER["momentum"](net.parameters())], mesh.site, range(9))
        before = copy.deepcopy(net)
        session.flush()
        session.detach()
        return before, net

    formula = Formula(2, 4, **turns).steps(0, 9)
    expected = copy.deepcopy(formula.sites)
    formula.flush()
    for number, (before, after) in enumerate(run_mesh(2, 2, body)):
        assert_close(before, expected[number // 2])
        assert_close(after, formula.sites[number // 2])


@pytest.mark.parametrize("whole", [False, True], ids=["", "whole"])
@pytest.mark.parametrize("name", LOW_RANK)
def test_ranks_of_a_site_keep_what_each_of_them_has_not_sent(name, whole):
    def trained(net, session, site):
        train(net, [INNER["momentum"](net.parameters())], site, range(6))
        before = copy.deepcopy(net)
        session.flush(whole=whole)
        assert not (whole and session._exchange.compressors.owe)
        session.detach()
        return before, net

    def of_one_rank(rank, group):
        net = model()
        return trained(net, og.distribute(net, method(), group=group), rank)

    def of_mesh(mesh):
        net = model()
        return trained(net, og.distribute(net, method(), mesh=mesh), mesh.site)

    def method():
        return og.LocalSteps(2, outer=plain, method=LOW_RANK[name], error_reset=True)

    expected = run_on_lasting_groups(2, of_one_rank)
    found = run_mesh(2, 2, of_mesh)
    for number, pair in enumerate(found):
        for net, other in zip(pair, expected[number // 2], strict=True):
            # With owners another site merges a layer, and keeps what does not go into the rank.
            assert_close(net, other, limit=0.05 if "merged" in name else 1e-4)
        for net, other in zip(pair, found[number - number % 2], strict=True):
            assert all(map(torch.equal, net.parameters(), other.parameters()))


# -- what is said and refused --------------------------------------------------------------------


def test_coverage_and_recorders_tell_of_fragments():
    def body(rank, group):
        events, net = Events(), model()
        session = og.distribute(net, og.LocalSteps(4, stream=2), group=group, recorder=events)
        train(net, [INNER["sgd"](net.parameters())], rank, range(8))
        lines = {line.parameter: line.why for line in session.coverage()}
        session.detach()
        return lines, {(event.step, event.layer) for event in events.layers}

    for lines, found in run_on_lasting_groups(2, body):
        for k, names in enumerate(PARTS[2]):
            for name in names:
                assert lines[name].startswith(
                    f"change of the weights, every 4 steps, fragment {k + 1} of 2; "
                )
        assert found == {(step, name) for step in range(4) for name in PARTS[2][step % 2]}


def test_layers_that_are_alike_are_dealt_out_in_turns():
    def body(rank, group):
        session = og.distribute(mlp(*[8] * 7), og.LocalSteps(3, stream=3), group=group)
        found = [fragment.names for fragment in session._updates.fragments._all]
        session.detach()
        return found

    (found,) = run_on_lasting_groups(1, body)
    layers = [{name for name in names if "weight" in name} for names in found]
    assert layers == [{"0.weight", "6.weight"}, {"2.weight", "8.weight"}, {"4.weight", "10.weight"}]


def test_turns_pass_over_what_does_not_differ():
    fragments = Fragments([frozenset({name}) for name in "abc"])
    assert not fragments.seek()
    fragments.stepped()
    fragments.due.differs = False
    assert fragments.seek()
    assert fragments.due.names == {"b"}


REFUSED = {
    "no number": ({"stream": 0}, "stream=0; use a whole number, 1 or more, that divides k=12"),
    "uneven": ({"stream": 5}, "stream=5; use a whole number, 1 or more, that divides k=12"),
    "too long": ({"stream": 4, "overlap": 3}, "overlap=3; .* less than k / stream = 3"),
    "half": ({"overlap": 0.5}, "overlap=0.5; use a whole number"),
    "all kept": ({"alpha": 1}, "alpha=1; use 0 or more and less than 1"),
    "no alpha": ({"alpha": "a"}, "alpha='a'; use 0 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_checked(name):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        og.LocalSteps(12, **settings)


def test_sites_compare_the_turns():
    assert "stream" not in repr(og.LocalSteps(4, stream=1, alpha=0))
    told = repr(og.LocalSteps(4, stream=2, overlap=1))
    assert told.endswith("method=Dense(), stream=2, overlap=1, alpha=0.5)")


def test_a_model_of_fewer_parts_is_refused():
    def body(rank, group):
        Site(og.LocalSteps(8, stream=8), rank, group)

    for error in try_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "stream=8, but the model has 6 parameters" in str(error)
