"""Methods with `every=k`: nothing travels in between, and then the mean over passes and sites."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.optim import SGD

import outergrad as og
from cases import SHARED_STREAM, Events, build, mlp, relative_error, run, to_double
from covering import covering
from ranks import run_on_lasting_groups, run_ranks, try_ranks

pytestmark = pytest.mark.usefixtures("large_matrices")

CASES = build()
EXACT = {
    "dense": og.Dense,
    "dad": og.DAD,
    "dad raw": lambda **k: og.DAD(reveal="activations", **k),
    "dad forced": lambda **k: og.DAD(always=True, **k),
    "dad raw forced": lambda **k: og.DAD(always=True, reveal="activations", **k),
    "edad forced": lambda **k: og.EDAD(always=True, **k),
    "rank-dad, full rank": lambda **k: og.RankDAD(rank=1000, **k),
    "powersgd, full rank": lambda **k: og.PowerSGD(rank=1000, min_ratio=1, **k),
    "sparse, all entries": lambda **k: og.Sparse(density=1.0, always=True, **k),
}
LOW_RANK = {
    "rank-dad": lambda **k: og.RankDAD(rank=2, **k),
    "rank-dad, all-reduced": lambda **k: og.RankDAD(rank=2, reduce="all_reduce", **k),
    "powersgd": lambda **k: og.PowerSGD(rank=2, min_ratio=1, **k),
    "sparse": lambda **k: og.Sparse(density=0.1, **k),
    "sparse, added up": lambda **k: og.Sparse(density=0.1, select="random", **k),
    "dad, encoded": lambda **k: og.DAD(wire=og.wire.Int8(), **k),
}


class Net(nn.Module):
    """Layers with a rule, a norm without, and a gate that is not always used."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(30, 40), nn.LayerNorm(40)
        self.gate, self.last = nn.Linear(40, 40), nn.Linear(40, 12)

    def forward(self, x, *, gated=True):
        h = self.norm(self.first(x).relu())
        return self.last(h * self.gate(h) if gated else h)


torch.manual_seed(0)
NET = Net()


class Site:
    """A model with its passes; distributed, or, for the reference, in float64 and not."""

    def __init__(self, rank, method=None, group=None):
        self.rank, self.model = rank, copy.deepcopy(NET)
        self.no_sync, self.session = nullcontext, None
        if method is None:
            self.model.double()
        else:
            self.session = og.distribute(self.model, method, group=group)
            self.no_sync = self.session.no_sync

    def loss(self, number, rows=None, **kwargs):
        """Batches of other sizes on every site and in every pass, unless rows are given."""
        rows = 1 + (number + self.rank) % 3 if rows is None else rows
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        x = torch.randn(rows, 30, generator=generator).to(self.model.last.weight.dtype)
        return (self.model(x, **kwargs) ** 2).sum() / 10

    def step(self, number, **kwargs):
        self.loss(number, **kwargs).backward()

    def local(self, number, **kwargs):
        with self.no_sync():
            self.loss(number, **kwargs).backward()

    def zero(self):
        self.model.zero_grad()

    def gradients(self):
        named = self.model.named_parameters()
        return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def pooled(sites, script, k):
    """The mean over the sites and k passes of what a script leaves without any of our code."""
    total = {}
    for rank in range(sites):
        site = Site(rank)
        script(site)
        for name, gradient in site.gradients().items():
            if gradient is not None:
                total[name] = total.get(name, 0) + gradient / (k * sites)
    return {name: total.get(name) for name in dict(NET.named_parameters())}


def passes(*numbers, **kwargs):
    def script(site):
        for number in numbers:
            site.step(number, **kwargs)

    return script


def assert_close(gradients, expected, limit=5e-6):
    for name, gradient in gradients.items():
        error = relative_error(gradient, expected[name])
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "sites", "k"), covering(EXACT.keys(), [1, 2, 3], [1, 2, 3], quick=6, every=3)
)
def test_the_gradient_is_the_mean_over_passes_and_sites(name, sites, k):
    """Three times; in between there is none."""
    expected = [pooled(sites, passes(*range(n, n + k)), k) for n in range(0, 3 * k, k)]

    def body(rank, group):
        site = Site(rank, EXACT[name](every=k), group)
        for number in range(3 * k):
            site.zero()
            site.step(number)
            if number % k == k - 1:
                assert_close(site.gradients(), expected[number // k])
            else:
                assert not any(g is not None for g in site.gradients().values())
        site.session.detach()

    run_on_lasting_groups(sites, body)


@pytest.mark.parametrize(("name", "label"), covering(CASES.keys(), EXACT.keys(), quick=16, every=8))
def test_every_layer_waits(name, label):
    if name in SHARED_STREAM:
        pytest.skip("threads share one random stream")
    case, sites, k = CASES[name](), 2, 3
    reference = copy.deepcopy(case.model).double()
    for batch in case.batches[:sites]:
        for weight in range(1, k + 1):
            (run(reference, case, to_double(batch)) * weight / (k * sites)).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank, group):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, EXACT[label](every=k), group=group)
        for _ in range(2):
            model.zero_grad()
            for weight in range(1, k + 1):
                (weight * run(model, case, case.batches[rank])).backward()
        session.detach()
        return {name: p.grad for name, p in model.named_parameters()}

    for gradients in run_on_lasting_groups(sites, body):
        assert_close(gradients, expected)


@pytest.mark.parametrize("name", [*EXACT, *LOW_RANK])
def test_nothing_travels_in_between(name):
    """Not even headers; and once every k steps as much as the method sends for all rows."""
    make = {**EXACT, **LOW_RANK}[name]

    def body(rank, group):
        site, sent = Site(rank, make(every=3), group), []
        for number in range(18):
            site.zero()
            before = site.session._at.comm.sent_bytes
            site.step(number, rows=1)
            sent.append(site.session._at.comm.sent_bytes - before)
        steps = site.session.stats().step
        site.session.detach()
        whole = Site(rank, make(), group)
        for number in range(6):
            whole.zero()
            whole.step(number, rows=3)
        expected = whole.session.stats().sent_bytes
        whole.session.detach()
        return sent, steps, expected

    for sent, steps, expected in run_on_lasting_groups(2, body):
        assert steps == 6
        assert all(n == 0 for number, n in enumerate(sent) if number % 3 != 2)
        assert sent[-1] == sent[-4] == expected > 0


@pytest.mark.parametrize(
    ("rows", "k", "way"), [(1, 4, "factors"), (5, 8, "dense"), (20, 4, "dense")]
)
def test_rows_are_kept_while_they_pay(rows, k, way):
    """And then formed: what is kept is never more than the gradients."""
    limit = sum(p.numel() for p in NET.parameters())
    expected = pooled(2, passes(*range(k, 2 * k), rows=rows), k)

    def body(rank, group):
        site = Site(rank, og.DAD(every=k), group)
        for number in range(2 * k):
            site.zero()
            site.step(number, rows=rows)
            assert site.session._exchange.accumulator.numel <= limit
        travels = {name: layer.travels for name, layer in site.session.stats().layers.items()}
        assert_close(site.gradients(), expected)
        site.session.detach()
        return travels

    for travels in run_on_lasting_groups(2, body):
        assert (travels.get("first") or travels["first.weight"]) == way


def test_layers_that_do_not_pay_are_left_alone_in_the_next_round():
    """The rows of all passes count, also of those in which another part of the model was due."""

    def body(rank, group):
        method = og.PerLayer({"first.*": og.DAD(), "*": og.DAD(every=4)})
        site = Site(rank, method, group)
        wanted = []
        for number in range(12):
            site.zero()
            site.step(number, rows=6)
            taps = site.session._exchange.next_forward.tap_next.items()
            wanted.append({unit.params[0] for unit, wants in taps if wants})
        site.session.detach()
        return wanted

    for wanted in run_on_lasting_groups(2, body):
        assert wanted[2] == {"first.weight", "gate.weight", "last.weight"}, "not known yet"
        assert wanted[3:] == [{"first.weight"}] * 9


@pytest.mark.parametrize("name", LOW_RANK)
def test_replicas_stay_equal_at_low_rank(name):
    def body(rank, group):
        site = Site(rank, LOW_RANK[name](every=2), group)
        optimizer = SGD(site.model.parameters(), lr=0.1, momentum=0.9)
        for number in range(8):
            optimizer.zero_grad()
            site.step(number)
            optimizer.step()
        site.session.detach()
        return list(site.model.parameters())

    ours, theirs = run_on_lasting_groups(2, body)
    assert all(p.equal(q) for p, q in zip(ours, theirs, strict=True))
    assert not any(p.equal(q) for p, q in zip(ours, NET.parameters(), strict=True))


# -- a cadence per part of the model -------------------------------------------------------------

TWO = {
    "dense and dense": (og.Dense(every=2), og.Dense(every=3)),
    "factors and dense": (og.DAD(always=True, every=2), og.Dense(every=3)),
    "factors and low rank": (og.DAD(always=True, every=2), og.RankDAD(rank=1000, every=3)),
    "every step and now and then": (og.DAD(always=True), og.RankDAD(rank=1000, every=3)),
}


def a_cadence_each(methods):
    return og.PerLayer({"first.*": methods[0], "*": methods[1]})


def every_of(methods, name):
    return methods[0 if name.startswith("first.") else 1].every


@pytest.mark.parametrize(("name", "sites"), covering(TWO.keys(), [1, 2, 3], quick=2))
def test_every_part_has_its_own_cadence(name, sites):
    methods = TWO[name]
    expected = {
        (k, number): pooled(sites, passes(*range(number - k + 1, number + 1)), k)
        for k in {method.every for method in methods}
        for number in range(k - 1, 12, k)
    }

    def body(rank, group):
        site = Site(rank, a_cadence_each(methods), group)
        for number in range(12):
            site.zero()
            site.step(number)
            for parameter, gradient in site.gradients().items():
                key = every_of(methods, parameter), number
                if key in expected:
                    error = relative_error(gradient, expected[key][parameter])
                    assert error < 5e-6, (parameter, number)
                else:
                    assert gradient is None, (parameter, number)
        site.session.detach()

    run_on_lasting_groups(sites, body)


def test_what_is_computed_again_stands_beside_a_cadence():
    method = og.PerLayer({"0.*": og.DAD(always=True, every=3), "*": og.EDAD(always=True)})
    original = mlp(30, 40, 20, 12, 5)
    inputs = [torch.randn(2 + rank, 30) for rank in range(2)]
    reference = copy.deepcopy(original).double()
    for x in inputs:
        (reference(x.double()).square().sum() / 2).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank, group):
        net = copy.deepcopy(original)
        session = og.distribute(net, method, group=group)
        for number in range(9):
            net.zero_grad()
            net(inputs[rank]).square().sum().backward()
            for name, p in net.named_parameters():
                due = number % 3 == 2 or not name.startswith("0.")
                assert relative_error(p.grad, expected[name] if due else None) < 5e-6, name
        travels = {line.parameter: line.travels for line in session.coverage()}
        session.detach()
        return travels

    for travels in run_on_lasting_groups(2, body):
        assert (travels["0.weight"], travels["4.weight"]) == ("factors", "replayed")


def test_equal_steps_of_two_cadences_go_without_headers():
    """What is due differs from step to step; each kind of step is foreseen by itself."""
    methods = og.DAD(always=True, every=2), og.Dense(every=3)

    def body(rank, group):
        site, sent = Site(rank, a_cadence_each(methods), group), []
        for number in range(24):
            site.zero()
            before = site.session._at.comm.sent_bytes
            site.step(number, rows=2)
            sent.append(site.session._at.comm.sent_bytes - before)
        site.session.detach()
        return sent

    for sent in run_ranks(2, body):  # alone on their groups, so that headers may be left out
        assert sent[18:] == sent[12:18], "the third and the fourth time nothing is new"
        assert sent[5] > sent[17] > sent[15] > 0
        assert sent[17] > sent[14] > 0
        assert sent[12] == sent[16] == 0


# -- what users do besides -----------------------------------------------------------------------


def accumulated_at_first(site):
    site.local(0)
    site.step(1)
    site.step(2)


def accumulated_at_last(site):
    site.step(0)
    site.local(1)
    site.local(2)
    site.step(3)


def accumulated_always(site):
    site.local(0)
    site.step(1)
    site.local(2)
    site.step(3)


def accumulated_and_scaled(site):
    site.local(0)
    for p in site.model.parameters():
        p.grad.mul_(0.5)
    site.step(1)
    site.step(2)


def a_gate_at_first(site):
    site.step(0)
    site.step(1, gated=False)


def a_gate_at_last(site):
    site.step(0, gated=False)
    site.step(1)


def a_gate_on_one_site(site):
    site.step(0, gated=site.rank == 0)
    site.step(1, gated=False)


def no_rows(site):
    site.step(0, rows=site.rank)
    site.step(1, rows=1 - site.rank)


def some_parameters(site):
    site.loss(0).backward(inputs=[site.model.first.weight])
    site.step(1)


def some_parameters_at_last(site):
    site.step(0)
    site.loss(1).backward(inputs=[site.model.first.weight])


def penalty(model):
    return sum((p**2).sum() for p in model.parameters()) / 100


def a_penalty(site):
    (site.loss(0) + penalty(site.model)).backward()
    site.step(1)


def a_penalty_at_last(site):
    site.step(0)
    (site.loss(1) + penalty(site.model)).backward()


def a_penalty_after_no_sync(site):
    site.local(0)
    (site.loss(1) + penalty(site.model)).backward()
    site.step(2)


def a_penalty_before_no_sync(site):
    (site.loss(0) + penalty(site.model)).backward()
    site.local(1)
    site.step(2)


def a_gradient_before(site):
    for p in site.model.parameters():
        p.grad = torch.ones_like(p)
    site.step(0)
    site.step(1)


def other_weights(site):
    site.step(0)
    with torch.no_grad():
        for p in site.model.parameters():
            p.mul_(0.5)
    site.step(1)


def inputs_overwritten(site):
    x = torch.randn(1, 30, generator=torch.Generator().manual_seed(site.rank))
    x = x.to(site.model.last.weight.dtype)
    (site.model(x) ** 2).sum().backward()
    x.fill_(7.0)
    site.step(1, rows=1)


def two_forwards_first(site):
    losses = [site.loss(0), site.loss(1)]
    losses[0].backward()
    losses[1].backward()


SCRIPTS = [
    accumulated_at_first,
    accumulated_at_last,
    accumulated_always,
    accumulated_and_scaled,
    a_gate_at_first,
    a_gate_at_last,
    a_gate_on_one_site,
    no_rows,
    some_parameters,
    some_parameters_at_last,
    a_penalty,
    a_penalty_at_last,
    a_penalty_after_no_sync,
    a_penalty_before_no_sync,
    a_gradient_before,
    other_weights,
    inputs_overwritten,
    two_forwards_first,
]
"""Two synchronised passes each."""


@pytest.mark.parametrize(("script", "name"), covering(SCRIPTS, EXACT.keys(), quick=8, every=4))
def test_whatever_else_is_done_the_gradient_is_the_pooled_one(name, script):
    expected = pooled(2, script, 2)

    def body(rank, group):
        site = Site(rank, EXACT[name](every=2), group)
        for _ in range(3):
            site.model.load_state_dict(NET.state_dict())
            site.zero()
            script(site)
            assert_close(site.gradients(), expected)
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_rows_of_passes_without_sync_travel_along():
    def body(rank, group):
        site = Site(rank, og.DAD(always=True, every=2), group)
        for _ in range(2):
            site.zero()
            accumulated_always(site)
        layers = site.session.stats().layers
        site.session.detach()
        return layers["first.weight"].travels

    assert run_on_lasting_groups(2, body) == ["factors"] * 2


def test_no_sync_leaves_the_local_gradient_alone():
    def body(rank, group):
        site, alone = Site(rank, og.DAD(every=3), group), Site(rank)
        site.step(0)
        site.local(1)
        alone.local(1)
        assert_close(site.gradients(), alone.gradients())
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_zeroing_in_place_costs_the_rows_alone():
    expected = pooled(2, passes(2, 3), 2)

    def body(rank, group):
        site = Site(rank, og.DAD(every=2), group)
        for number in range(4):
            site.model.zero_grad(set_to_none=False)
            site.step(number)
        assert_close(site.gradients(), expected)
        site.session.detach()

    run_on_lasting_groups(2, body)


# -- backward passes that raise ------------------------------------------------------------------


def stumble(site, number):
    """A backward that raises on site 1."""

    def fail(gradient):
        raise ZeroDivisionError

    def hook(module, args, output):
        if site.rank == 1:
            args[0].register_hook(fail)

    handle = site.model.gate.register_forward_hook(hook)
    loss = site.loss(number)
    handle.remove()
    loss.backward()


@pytest.mark.parametrize("name", EXACT)
def test_a_discarded_exchange_takes_its_passes_with_it(name):
    expected = pooled(2, passes(2, 3), 2)

    def body(rank, group):
        site = Site(rank, EXACT[name](every=2), group)
        site.step(0)
        error = ZeroDivisionError if rank == 1 else og.StepDiscardedError
        with pytest.raises(error):
            stumble(site, 1)
        site.session.state_dict()  # ends the step on the site that raised
        assert site.session._exchange.accumulator.numel == 0
        site.zero()
        passes(2, 3)(site)
        assert_close(site.gradients(), expected)
        site.session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("name", EXACT)
def test_a_pass_that_raises_in_between_is_missing_where_it_did(name):
    def script(site):
        site.step(0)
        if site.rank == 0:
            site.step(1)
        site.step(2)

    expected = pooled(2, script, 3)

    def body(rank, group):
        site = Site(rank, EXACT[name](every=3), group)
        site.step(0)
        with suppress(ZeroDivisionError):
            stumble(site, 1)
        site.zero()
        site.step(2)
        assert_close(site.gradients(), expected)
        site.session.detach()

    run_on_lasting_groups(2, body)


def test_what_is_not_due_in_a_discarded_step_loses_that_pass_alone():
    """On all sites; the passes before it are kept."""
    methods = og.DAD(always=True), og.DAD(always=True, every=3)
    expected = pooled(2, passes(0, 2), 3)

    def body(rank, group):
        site = Site(rank, a_cadence_each(methods), group)
        site.step(0)
        site.zero()
        with suppress(ZeroDivisionError, og.StepDiscardedError):
            stumble(site, 1)
        site.zero()
        site.step(2)
        gradients = site.gradients()
        site.session.detach()
        for name in ("gate.weight", "gate.bias", "last.weight"):
            assert relative_error(gradients[name], expected[name]) < 5e-6

    run_on_lasting_groups(2, body)


# -- saved and loaded ----------------------------------------------------------------------------

SAVED = {
    **{name: make(every=3) for name, make in {**EXACT, **LOW_RANK}.items()},
    **{name: a_cadence_each(methods) for name, methods in TWO.items()},
}


def train(site, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        site.step(number)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "saved_after"), covering(SAVED.keys(), [4, 5, 6], quick=6, every=3)
)
def test_training_goes_on_to_the_bit(name, saved_after):
    def start(rank, group):
        site = Site(rank, SAVED[name], group)
        return site, SGD(site.model.parameters(), lr=0.1, momentum=0.9)

    def body(rank, group):
        whole, optimizer = start(rank, group)
        train(whole, optimizer, range(saved_after))
        file = io.BytesIO()
        parts = (whole.model, optimizer, whole.session)
        torch.save([part.state_dict() for part in parts], file)
        train(whole, optimizer, range(saved_after, 12))
        again, optimizer = start(rank, group)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        for part, state in zip((again.model, optimizer, again.session), states, strict=True):
            part.load_state_dict(state)
        train(again, optimizer, range(saved_after, 12))
        for (n, p), q in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
            assert p.equal(q), n

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["dense", "dad", "dad forced"])
def test_what_is_kept_is_shared_out(name, before, after):
    """The mean is over the old sites for the passes before, over the new ones afterwards."""
    old = pooled(before, passes(0, 1), 3)
    new = pooled(after, passes(2), 3)
    expected = {parameter: old[parameter] + new[parameter] for parameter in old}

    def save(rank, group):
        site = Site(rank, EXACT[name](every=3), group)
        passes(0, 1)(site)
        state = site.session.state_dict()
        site.session.detach()
        return state

    states = run_on_lasting_groups(before, save)

    def go_on(rank, group):
        site = Site(rank, EXACT[name](every=3), group)
        site.session.load_state_dict(states)
        site.step(2)
        assert_close(site.gradients(), expected)
        site.session.detach()

    run_on_lasting_groups(after, go_on)


@pytest.mark.parametrize("name", TWO)
def test_a_running_session_goes_back_to_what_it_saved(name):
    def body(rank, group):
        site = Site(rank, a_cadence_each(TWO[name]), group)
        passes(*range(9))(site)
        site.zero()
        site.step(9)
        state = site.session.state_dict()
        found = []
        for _ in range(2):
            site.session.load_state_dict(state)
            site.zero()
            passes(10, 11)(site)
            found.append(site.gradients())
        site.session.detach()
        return found

    for first, second in run_on_lasting_groups(2, body):
        assert all(first[n].equal(second[n]) for n in first)


def test_detach_drops_what_is_kept():
    def body(rank, group):
        site = Site(rank, og.DAD(every=3), group)
        site.step(0)
        assert site.session._exchange.accumulator.numel > 0
        site.session.detach()
        assert site.session._exchange.accumulator.numel == 0

    run_on_lasting_groups(2, body)


# -- what is said and refused --------------------------------------------------------------------


def test_coverage_says_how_often():
    def body(rank, group):
        site = Site(rank, a_cadence_each(TWO["every step and now and then"]), group)
        for number in range(3):
            site.step(number)
        lines = {line.parameter: line.why for line in site.session.coverage()}
        site.session.detach()
        return lines

    for lines in run_on_lasting_groups(2, body):
        often = {name for name, why in lines.items() if why.endswith("; every 3 steps")}
        assert often == {name for name in lines if not name.startswith("first.")}
        assert "every" not in lines["first.weight"]


def test_a_recorder_hears_of_what_travelled():
    def body(rank, group):
        events, net = Events(), mlp(6, 9, 5)
        method = og.PerLayer({"0.*": og.DAD(always=True, every=2), "*": og.DAD(always=True)})
        session = og.distribute(net, method, group=group, recorder=events)
        for _ in range(4):
            net.zero_grad()
            net(torch.ones(2, 6)).sum().backward()
        session.detach()
        return [(event.step, event.layer, event.rows) for event in events.layers]

    for events in run_on_lasting_groups(2, body):
        rows = [(step, "2.weight", 2) for step in range(4)]
        assert sorted(events) == sorted([*rows, (1, "0.weight", 4), (3, "0.weight", 4)])


@pytest.mark.parametrize("method", [og.DAD, og.Dense, og.RankDAD, og.PowerSGD])
def test_settings_are_checked(method):
    with pytest.raises(ValueError, match=f"{method.__name__}: every=0; use 1 or more"):
        method(every=0)


def test_joint_parts_have_no_cadence():
    with pytest.raises(ValueError, match="leave every=1"):
        og.PerLayer({"0.*": og.Local(), "*": og.Dense(every=2)}, joint=True)


def test_local_steps_have_a_cadence_of_their_own():
    with pytest.raises(ValueError, match="leave every=1"):
        og.LocalSteps(4, method=og.Dense(every=2))


def test_sites_with_another_cadence_do_not_begin():
    for error in try_ranks(2, lambda rank, group: Site(rank, og.DAD(every=2 + rank), group)):
        assert isinstance(error, ValueError)
        assert "every=2" in str(error)
        assert "every=3" in str(error)
