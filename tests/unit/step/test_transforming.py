"""Transforms in training loops of every kind: what they see is what the site would have sent."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import pytest
import torch
from examples.privacy import DPSGD, ClippedLayers, ClippedSite, Half
from torch import nn
from torch.optim import SGD

import outergrad as og
from by_sample import CASES as OF_SAMPLES
from by_sample import SampleCase, by_sample, loss_of, total
from cases import METHODS, SHARED_STREAM, Boom, Branches, build, mlp, pooled, relative_error, run
from covering import covering
from outergrad.transforms import formed
from ranks import run_on_lasting_groups
from seeding import seed

SITES = 2
CASES = build()
EXACT = {label: method for label, method in METHODS.items() if "edad" not in label}
REPLAYED = re.compile("rnn|gru|lstm|packed", re.IGNORECASE)
MODEL = mlp(40, 48, 32)
XS = [torch.randn(5, 40), torch.randn(3, 40)]


def own_gradient(model, *batches):
    """This site's own, in float64: the sum over its batches."""
    alone = copy.deepcopy(model).double()
    for x in batches:
        alone(x.double()).square().mean().backward()
    return {n: p.grad for n, p in alone.named_parameters()}


def clipped(gradients, limit):
    whole = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    return {n: g * min(1.0, limit / float(whole)) for n, g in gradients.items()}


def mean(parts):
    return {n: torch.stack([part[n] for part in parts]).mean(0) for n in parts[0]}


def check(model, expected, limit=1e-5):
    for name, p in model.named_parameters():
        assert relative_error(p.grad, expected[name]) < limit, name


@pytest.mark.parametrize(
    ("name", "label"), covering(CASES.keys(), EXACT.keys(), quick=20, every=10)
)
def test_half_of_every_model(name, label):
    """Also of weights that are used outside of their layers, on one site alone, or nowhere."""
    if name in SHARED_STREAM:
        pytest.skip("threads share one random stream")
    case = CASES[name]()
    expected = pooled(case, SITES)

    def body(rank, group):
        model, found = copy.deepcopy(case.model), []
        try:
            session = og.distribute(model, EXACT[label], group=group, transform=Half())
        except ValueError:  # recurrent layers, of which activations would be sent
            return None
        for _ in range(3):
            model.zero_grad()
            seed(7)
            run(model, case, case.batches[rank]).backward()
            found.append({n: p.grad for n, p in model.named_parameters()})
        session.detach()
        return found

    for steps in run_on_lasting_groups(SITES, body):
        assert steps is not None or ("raw" in label and REPLAYED.search(name))
        for gradients in steps or ():
            for parameter, whole in expected.items():
                half = None if whole is None else whole / 2
                error = relative_error(gradients[parameter], half)
                assert error < 5e-6, f"{parameter}: {error:.1e}"


def penalised(model, x, on):
    return model(x).square().mean() + (model[0].weight.square().sum() if on else 0.0)


@pytest.mark.parametrize("label", EXACT)
def test_a_norm_over_what_autograd_adds(label):
    """Outside of the rows, on one site alone."""
    expected = []
    for rank, x in enumerate(XS):
        alone = copy.deepcopy(MODEL).double()
        penalised(alone, x.double(), rank == 1).backward()
        expected.append(clipped({n: p.grad for n, p in alone.named_parameters()}, 0.1))

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, EXACT[label], group=group, transform=ClippedSite(0.1))
        for _ in range(3):
            model.zero_grad()
            penalised(model, XS[rank], rank == 1).backward()
            check(model, mean(expected))
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("label", EXACT)
def test_passes_in_no_sync_are_one_gradient(label):
    expected = mean([clipped(own_gradient(MODEL, x, x[:2]), 0.1) for x in XS])

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, EXACT[label], group=group, transform=ClippedSite(0.1))
        for _ in range(3):
            model.zero_grad()
            with session.no_sync():
                model(XS[rank][:2]).square().mean().backward()
            model(XS[rank]).square().mean().backward()
            check(model, expected)
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize(
    "method",
    [og.DAD(always=True, every=2), og.Dense(every=2), og.RankDAD(rank=1000, every=2)],
    ids=str,
)
def test_passes_between_two_exchanges_are_one_gradient(method):
    expected = mean([clipped(own_gradient(MODEL, x, x[:2]), 0.1) for x in XS])

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, method, group=group, transform=ClippedSite(0.1))
        for _ in range(3):
            model.zero_grad()
            model(XS[rank][:2]).square().mean().backward()
            assert all(p.grad is None for p in model.parameters())
            model(XS[rank]).square().mean().backward()
            check(model, {n: g / 2 for n, g in expected.items()})
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("method", [og.Dense(), og.RankDAD(rank=1000)], ids=str)
def test_changes_of_local_steps_are_clipped(method):
    """Each site's change of the weights, as in federated averaging with clipping by client."""
    limit, moves = 0.01, []
    start = {n: p.detach().double() for n, p in MODEL.named_parameters()}
    for x in XS:
        alone = copy.deepcopy(MODEL).double()
        optimizer = SGD(alone.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            alone(x.double()).square().mean().backward()
            optimizer.step()
        now = {n: p.detach() for n, p in alone.named_parameters()}
        moves.append(clipped({n: start[n] - p for n, p in now.items()}, limit))
    change = mean(moves)

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        steps = og.LocalSteps(2, outer=lambda params: SGD(params, lr=1.0), method=method)
        session = og.distribute(model, steps, group=group, transform=ClippedSite(limit))
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(XS[rank]).square().mean().backward()
            optimizer.step()
        for name, p in model.named_parameters():
            made = start[name] - p.detach().double()
            assert relative_error(made, change[name]) < 1e-3, name
        assert "after ClippedSite" in session.coverage()[0].why
        session.detach()

    run_on_lasting_groups(SITES, body)


@dataclass(frozen=True)
class Ones:
    """Has ones travel in place of gradients: what noise does, but known."""

    needs_samples = False
    needs_all_layers = False
    forms = True

    def __call__(self, gradient):
        found = {n: torch.ones_like(g) for n, g in formed(gradient).formed.items()}
        return og.SiteGradient({}, found, gradient.params)


@pytest.mark.parametrize("label", EXACT)
def test_what_a_site_does_not_use_is_transformed_too(label):
    """Its share of what travels is noise as well; what nobody uses has no gradient."""

    def forward(m, x):
        y = m.first(x)
        return m.second(y) if len(x) == 3 else y

    layers = {name: nn.Linear(6, 6) for name in ("first", "second", "third")}
    plain = Branches(forward, **layers, norm=nn.LayerNorm(6))

    def body(rank, group):
        model = copy.deepcopy(plain)
        session = og.distribute(model, EXACT[label], group=group, transform=Ones())
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(5 - 2 * rank, 6)).sum().backward()
            for name, p in model.named_parameters():
                if name.startswith(("third", "norm")):
                    assert p.grad is None
                else:
                    torch.testing.assert_close(p.grad, torch.ones_like(p))
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("transform", [Half(), DPSGD(1e9), ClippedLayers(1e9)], ids=str)
def test_a_site_that_has_run_out_sends_nothing(transform):
    """And is transformed nothing; the mean is over the sites that have a batch."""
    factor = 0.5 if transform == Half() else 1.0

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.DAD(always=True), group=group, transform=transform)
        optimizer = SGD(model.parameters(), lr=0.0)
        with session.join():
            for step in range(1 + rank):
                optimizer.zero_grad()
                model(XS[rank]).square().mean().backward()
                parts = [own_gradient(MODEL, x) for x in XS][1 if step else 0 :]
                check(model, {n: factor * g for n, g in mean(parts).items()})
                optimizer.step()
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.parametrize("transform", [Half(), ClippedSite(0.1), DPSGD(1e9)], ids=str)
@pytest.mark.parametrize("method", [og.DAD(), og.DAD(always=True), og.Dense()], ids=str)
def test_a_single_site_is_transformed_too(transform, method):
    own = own_gradient(MODEL, XS[0])
    made = {Half(): {n: g / 2 for n, g in own.items()}, ClippedSite(0.1): clipped(own, 0.1)}

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, method, group=group, transform=transform)
        for _ in range(2):
            model.zero_grad()
            model(XS[0]).square().mean().backward()
            check(model, made.get(transform, own))
        session.detach()

    run_on_lasting_groups(1, body)


def test_a_single_site_in_a_joined_loop():
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        about = {"transform": ClippedSite(0.1), "verify_every": 1, "group": group}
        session = og.distribute(model, og.DAD(), **about)
        optimizer = SGD(model.parameters(), lr=0.0)
        with session.join():
            for _ in range(2):
                optimizer.zero_grad()
                model(XS[0]).square().mean().backward()
                check(model, clipped(own_gradient(MODEL, XS[0]), 0.1))
                optimizer.step()
        assert not session.make_equal()
        session.detach()

    run_on_lasting_groups(1, body)


@pytest.mark.parametrize("method", [og.DAD(), og.Dense(), og.RankDAD(rank=4)], ids=str)
def test_a_session_goes_on_from_its_state(method):
    """To the bit, with noise whose generator is saved beside it."""

    def steps(model, session, rank):
        found = []
        for _ in range(3):
            model.zero_grad()
            model(XS[rank]).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found

    def body(rank, group):
        generator = torch.Generator().manual_seed(rank)
        transform, model = DPSGD(1.0, 1.0, generator), copy.deepcopy(MODEL)
        session = og.distribute(model, method, group=group, transform=transform)
        steps(model, session, rank)
        saved, drawn = session.state_dict(), generator.get_state()
        expected = steps(model, session, rank)
        session.detach()
        session = og.distribute(model, method, group=group, transform=transform)
        session.load_state_dict(saved)
        generator.set_state(drawn)
        found = steps(model, session, rank)
        session.detach()
        return zip(expected, found, strict=True)

    for pairs in run_on_lasting_groups(SITES, body):
        assert all(torch.equal(*pair) for pair in pairs)


def test_a_backward_that_raises_is_discarded_and_the_next_counts():
    booming = Branches(
        lambda m, x, on: m.body(Boom.apply(m.first(x), on)),
        first=nn.Linear(40, 8),
        body=mlp(8, 9, 4),
    )

    def body(rank, group):
        model = copy.deepcopy(booming)
        session = og.distribute(model, og.DAD(always=True), group=group, transform=DPSGD(1e9))
        for step in range(3):
            model.zero_grad()
            armed = step == 1 and rank == 0
            try:
                model(XS[rank], armed).square().mean().backward()
            except (ArithmeticError, og.StepDiscardedError):
                assert step == 1
            else:
                assert step != 1
        session.detach()
        return [p.grad for p in model.parameters()]

    for first, second in zip(*run_on_lasting_groups(SITES, body), strict=True):
        assert torch.equal(first, second)


def test_gradients_that_are_not_finite_are_skipped():
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        about = {"transform": ClippedSite(0.1), "max_bad_steps": 2, "group": group}
        session = og.distribute(model, og.DAD(always=True), **about)
        model(XS[rank] * (torch.nan if rank else 1.0)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        model(XS[rank]).square().mean().backward()
        check(model, mean([clipped(own_gradient(MODEL, x), 0.1) for x in XS]))
        session.detach()

    run_on_lasting_groups(SITES, body)


@pytest.mark.slow
def test_compiled_models():
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.DAD(always=True), group=group, transform=DPSGD(1e9))
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            model.zero_grad()
            compiled(XS[rank]).square().mean().backward()
            check(model, mean([own_gradient(MODEL, x) for x in XS]))
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_coverage_says_what_travels():
    def body(rank, group):
        lines = {}
        for transform in (DPSGD(1.0), DPSGD(1.0, noise=2.0)):
            model = copy.deepcopy(MODEL)
            model[0].bias.requires_grad_(False)
            model[0].weight.requires_grad_(False)
            session = og.distribute(model, og.DAD(), group=group, transform=transform)
            for _ in range(2):
                model.zero_grad()
                model(XS[rank]).square().mean().backward()
            lines[transform.noise] = {line.parameter: line for line in session.coverage()}
            session.detach()
        return lines

    lines = run_on_lasting_groups(SITES, body)[0]
    assert [lines[noise]["2.weight"].travels for noise in (0.0, 2.0)] == ["factors", "dense"]
    assert lines[0.0]["0.weight"].why == "requires_grad is False"
    assert lines[0.0]["2.bias"].why.endswith("; after DPSGD(limit=1.0, noise=0.0)")
    assert lines[2.0]["2.bias"].why.startswith("the transform returns formed gradients; after ")


@pytest.mark.parametrize("name", ["norms", "tokens", "positions of all", "bias alone"])
def test_a_site_without_samples_in_a_step(name):
    """As Poisson sampling may leave one: the others' gradient counts, and nothing is made up."""
    torch.manual_seed(3)
    case = OF_SAMPLES[name]()
    x = case.batches[0]

    def body(rank, group):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, og.DAD(), group=group, transform=DPSGD(1e9))
        batch = x if rank == 0 else x[:0]
        y = model(batch)
        (loss_of(model, batch) if rank == 0 else y.sum()).backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    expected = total(by_sample(SampleCase(case.model, [x]), 0))
    for grads in run_on_lasting_groups(2, body):
        for parameter, wanted in expected.items():
            torch.testing.assert_close(grads[parameter].double(), wanted / 2, rtol=1e-4, atol=1e-6)
