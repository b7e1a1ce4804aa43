"""A backward that raises before it reaches the model is a step that does not count, on all sites.

Nothing of it is seen by the hooks of the model. If it were not noticed, this site's next step would
be paired with the others' one before, until the end.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

import outergrad as og
from cases import METHODS, Boom, mlp, relative_error
from covering import covering
from ranks import run_on_lasting_groups
from sites_apart import plain

TABLE = METHODS | {
    "auto": og.Auto(),
    "rank-dad, two ways": og.RankDAD(rank=1000, reduce="two_way"),
    "rank-dad, all_reduce": og.RankDAD(rank=1000, reduce="all_reduce"),
    "rank-dad, sides in turn": og.RankDAD(rank=2, reduce="alternate"),
    "edad blocks": og.EDAD(blocks=["0"], inputs="raw", always=True),
    "per layer": og.PerLayer({"0.*": og.DAD(), "*": og.Dense()}),
}
INEXACT = ("rank-dad, sides in turn",)
torch.manual_seed(3)
MODEL = nn.Sequential(mlp(6, 24, 24), nn.LayerNorm(24), nn.Linear(24, 5))
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(s)) for s in range(4)]
STEPS, FAILS = 7, 3


def batch(rank: int, step: int) -> torch.Tensor:
    return BATCHES[rank] + 0.3 * step


def loss_of(model: nn.Module, x: torch.Tensor, raises: bool) -> torch.Tensor:
    return (Boom.apply(model(x), raises) ** 2).mean()


@cache
def pooled(sites: int, step: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(MODEL).double()
    for rank in range(sites):
        (loss_of(model, batch(rank, step).double(), False) / sites).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_pairs(model: nn.Module, sites: int, step: int) -> None:
    """The gradient is that of the same step of all sites."""
    for name, expected in pooled(sites, step).items():
        assert relative_error(model.get_parameter(name).grad, expected) < 5e-6, (name, step)


def train(rank, sites, group, method, fails, *, exact=True, **options):
    """Which steps counted, and the errors of the others, on a site."""
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, method, group=group, **options)
    counted, errors = [], []
    for step in range(STEPS):
        model.zero_grad()
        try:
            loss_of(model, batch(rank, step), (rank, step) in fails).backward()
        except (ArithmeticError, og.StepDiscardedError) as error:
            errors.append((type(error).__name__, str(error)))
            continue
        counted.append(step)
        if exact:
            assert_pairs(model, sites, step)
    made = session.stats().step
    session.detach()
    return counted, errors, made


@pytest.mark.parametrize(
    ("name", "sites", "fails"), covering(list(TABLE), [2, 3], [0, FAILS], quick=4, every=2)
)
def test_a_raise_in_the_backward_of_the_loss_is_a_step_that_does_not_count(name, sites, fails):
    who = sites - 1

    def body(rank, group):
        return train(rank, sites, group, TABLE[name], {(who, fails)}, exact=name not in INEXACT)

    for rank, (counted, errors, made) in enumerate(run_on_lasting_groups(sites, body)):
        assert counted == [step for step in range(STEPS) if step != fails]
        assert made == STEPS
        ((kind, text),) = errors
        if rank == who:
            assert (kind, text) == ("ArithmeticError", "boom")
        else:
            assert kind == "StepDiscardedError"
            assert f"the backward of site {who} raised in step {fails}" in text


def test_several_in_a_row_and_on_several_sites():
    fails = {(0, 1), (0, 2), (1, 2), (1, 4), (0, STEPS - 1)}

    def body(rank, group):
        return train(rank, 2, group, og.DAD(), fails)

    for counted, errors, _ in run_on_lasting_groups(2, body):
        assert counted == [0, 3, 5]
        assert len(errors) == 4


# -- loops of which the steps are every k-th backward, of a part, or weighted ---------------------


def test_a_pass_that_shares_nothing_counts_too():
    """With every=2 the sites count the pass that raised, whether or not it was one that shares."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.PerLayer({"*": og.Dense(every=2)}), group=group)
        shared = []
        for step in range(9):
            model.zero_grad()
            try:
                loss_of(model, batch(rank, step), (rank, step) in {(0, 2), (0, 5)}).backward()
            except (ArithmeticError, og.StepDiscardedError):
                continue
            if any(p.grad is not None for p in model.parameters()):
                shared.append((step, [p.grad.clone() for p in model.parameters()]))
        session.detach()
        return shared

    first, second = run_on_lasting_groups(2, body)
    assert [step for step, _ in first] == [step for step, _ in second] == [1, 3, 7]
    for (_, ours), (_, theirs) in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_deltas_that_are_averaged_below_a_shared_part():
    def body(rank, group):
        torch.manual_seed(rank)
        model = nn.ModuleDict({"own": nn.Linear(6, 8), "shared": nn.Linear(8, 5)})
        method = og.PerLayer({"own.*": og.Local(), "*": og.DAD()}, joint=True)
        session = og.distribute(model, method, group=group)
        counted = []
        for step in range(STEPS):
            model.zero_grad()
            try:
                y = model["shared"](model["own"](batch(rank, step)))
                Boom.apply(y, (rank, step) == (1, FAILS)).square().mean().backward()
            except (ArithmeticError, og.StepDiscardedError):
                continue
            counted.append((step, model["shared"].weight.grad.clone()))
        session.detach()
        return counted

    first, second = run_on_lasting_groups(2, body)
    assert [step for step, _ in first] == [step for step in range(STEPS) if step != FAILS]
    assert all(s == t and torch.equal(a, b) for (s, a), (t, b) in zip(first, second, strict=True))


@pytest.mark.parametrize("options", [{"weighting": "samples"}, {"verify_every": 2}])
def test_options(options):
    def body(rank, group):
        return train(rank, 2, group, og.DAD(), {(0, FAILS)}, **options)

    for counted, errors, _ in run_on_lasting_groups(2, body):
        assert counted == [step for step in range(STEPS) if step != FAILS]
        assert len(errors) == 1


def test_two_models_that_take_turns():
    """Only the step of the model whose backward raised does not count."""

    def body(rank, group):
        models = [copy.deepcopy(MODEL), copy.deepcopy(MODEL)]
        sessions = [og.distribute(model, og.DAD(), group=group) for model in models]
        counted = []
        for step in range(STEPS):
            for k, model in enumerate(models):
                model.zero_grad()
                try:
                    loss_of(model, batch(rank, step), (rank, step, k) == (0, FAILS, 1)).backward()
                except (ArithmeticError, og.StepDiscardedError):
                    continue
                assert_pairs(model, 2, step)
                counted.append((step, k))
        for session in sessions:
            session.detach()
        return counted

    expected = [(step, k) for step in range(STEPS) for k in range(2) if (step, k) != (FAILS, 1)]
    assert run_on_lasting_groups(2, body) == [expected] * 2


def test_a_session_without_batches_left():
    """In `join()` the others, of which one has run out, hear of it as well."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.DAD(), group=group)
        optimizer, told = torch.optim.SGD(model.parameters(), lr=0.01), []
        with session.join(step=optimizer.step):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                try:
                    loss_of(model, batch(rank, step), (rank, step) == (1, 3)).backward()
                    optimizer.step()
                except (ArithmeticError, og.StepDiscardedError) as error:
                    told.append(type(error).__name__)
        session.detach()
        return told, [p.detach().clone() for p in model.parameters()]

    (_, ours), (told, theirs) = run_on_lasting_groups(2, body)
    assert told == ["ArithmeticError"]
    assert all(map(torch.equal, ours, theirs))


# -- what is none of it ---------------------------------------------------------------------------


class Site:
    """A site's models, and the loop around them."""

    def __init__(self, rank: int, group) -> None:
        self.rank, self.model = rank, copy.deepcopy(MODEL)
        self.other = nn.Linear(5, 1)
        self.session = og.distribute(self.model, og.DAD(), group=group)

    def raising(self, loss: torch.Tensor, **how) -> None:
        """On site 0 alone; the backward of something that is no step of this model."""
        if self.rank == 0:
            with pytest.raises(ArithmeticError):
                loss.backward(**how)


def of_another_model(site: Site, x: torch.Tensor) -> None:
    site.raising(Boom.apply(site.other(site.model(x).detach()), True).sum())


def in_no_sync(site: Site, x: torch.Tensor) -> None:
    with site.session.no_sync():
        site.raising(loss_of(site.model, x, True))


def for_inputs_alone(site: Site, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    site.raising(loss_of(site.model, x, True), inputs=[x])


def for_the_head_of_another(site: Site, x: torch.Tensor) -> None:
    loss = Boom.apply(site.other(site.model(x)), True).sum()
    site.raising(loss, inputs=list(site.other.parameters()))


def returned_to_the_caller(site: Site, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = loss_of(site.model, x, True)
    if site.rank == 0:
        with pytest.raises(ArithmeticError):
            torch.autograd.grad(loss, x)


def a_forward_with_a_graph(site: Site, x: torch.Tensor) -> None:
    for _ in range(site.rank):
        site.model(x)


def a_gradient_of_inputs(site: Site, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    for _ in range(site.rank):
        torch.autograd.grad(site.model(x).sum(), x)


def refused_before_the_engine(site: Site, x: torch.Tensor) -> None:
    if site.rank == 0:
        with pytest.raises(RuntimeError, match="scalar outputs"):
            site.model(x).backward()


def without_a_graph(site: Site, x: torch.Tensor) -> None:
    if site.rank == 0:
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss_of(site.model, x, False).detach().backward()


LEGAL = [
    refused_before_the_engine,
    without_a_graph,
    of_another_model,
    in_no_sync,
    for_inputs_alone,
    for_the_head_of_another,
    returned_to_the_caller,
    a_forward_with_a_graph,
    a_gradient_of_inputs,
]


@pytest.mark.parametrize("extra", LEGAL, ids=lambda extra: extra.__name__)
def test_what_is_no_step_of_the_model_costs_none(extra):
    def body(rank, group):
        site = Site(rank, group)
        for step in range(4):
            site.model.zero_grad()
            extra(site, batch(rank, step))
            site.model.zero_grad()
            loss_of(site.model, batch(rank, step), False).backward()
            assert_pairs(site.model, 2, step)
        site.session.detach()
        return site.session.stats().step

    assert run_on_lasting_groups(2, body) == [4, 4]


def test_a_local_step_that_raises_is_the_site_s_own():
    """It does not count: the site makes another one for it, and the sites exchange together."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.LocalSteps(2, outer=plain), group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            if (rank, step) == (0, 1):
                with pytest.raises(ArithmeticError, match="boom"):
                    loss_of(model, batch(rank, step), True).backward()
            loss_of(model, batch(rank, step), False).backward()
            optimizer.step()
        session.flush()
        made = session.stats().step
        session.detach()
        return made, [p.detach().clone() for p in model.parameters()]

    (made, ours), (others, theirs) = run_on_lasting_groups(2, body)
    assert made == others
    assert all(p.equal(q) for p, q in zip(ours, theirs, strict=True))


def test_a_backward_inside_one_that_survives_it():
    """A custom function tries something, and goes on by another way."""

    class Tries(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, delta):
            with torch.enable_grad():
                loss = Boom.apply(torch.ones(3, requires_grad=True), True).sum()
            with pytest.raises(ArithmeticError):
                loss.backward()
            return delta

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(4):
            model.zero_grad()
            (Tries.apply(model(batch(rank, step))) ** 2).mean().backward()
            assert_pairs(model, 2, step)
        session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_the_model_refuses_itself_is_told_the_others():
    """`create_graph=True` on one site: the others do not wait for what will never come."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.DAD(), group=group)
        told = []
        for step in range(4):
            model.zero_grad()
            try:
                graph = {"create_graph": True} if (rank, step) == (1, 1) else {}
                loss_of(model, batch(rank, step), False).backward(**graph)
            except RuntimeError as error:
                told.append(type(error).__name__)
                continue
            assert_pairs(model, 2, step)
        session.detach()
        return told

    assert run_on_lasting_groups(2, body) == [["StepDiscardedError"], ["RuntimeError"]]


def test_a_compiled_function_that_calls_backward():
    """Autograd's engine is called through a function of ours, which is no part of a graph."""
    model = mlp(4, 5, 3)
    run_on_lasting_groups(2, lambda rank, group: train(rank, 2, group, og.DAD(), {(0, 1)}))
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x):
        model(x).sum().backward()
        return x + 1

    step(torch.ones(2, 4))
    assert all(p.grad is not None for p in model.parameters())
