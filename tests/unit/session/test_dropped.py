"""A session that nobody has any more goes with its model; as long as the model lives it works."""

from __future__ import annotations

import gc
import logging
import sys
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import outergrad as og
from loops import METHODS, SOME, assert_close, batch, loss_of, net, pooled
from outergrad.core.types import Link
from outergrad.session.attach import attach
from ranks import run_ranks, try_ranks
from stars import comms_on_star

MORE: dict[str, Any] = {
    "auto": og.Auto(),
    "local steps": og.LocalSteps(2),
    "streams": og.LocalSteps(4, stream=2),
    "every 2": og.Dense(every=2),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def train(model: nn.Module, rank: int, steps: int = 3, first: int = 0) -> None:
    optimizer = sgd(model.parameters())
    for k in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, batch(rank, k, 2)).backward()
        optimizer.step()


def alive(refs: list[weakref.ref[Any]]) -> int:
    """How many are left after a look for garbage."""
    gc.collect()
    return sum(r() is not None for r in refs)


def wait_for(refs: list[weakref.ref[Any]]) -> None:
    """Until all are gone: a collection does nothing while another thread's is under way."""
    end = time.monotonic() + 20.0
    while any(r() is not None for r in refs):
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.01)


def dropped(group: Any, rank: int, method: Any, **settings: Any) -> list[weakref.ref[Any]]:
    """Trains a model, and forgets it."""
    model = net()
    session = og.distribute(model, method, group=group, **settings)
    train(model, rank)
    params = [weakref.ref(p) for p in model.parameters()]
    return [weakref.ref(model), weakref.ref(session), weakref.ref(session._at.comm), *params]


@pytest.mark.usefixtures("large_matrices")
@pytest.mark.parametrize(
    "method", [*SOME, *(pytest.param(name, id=name.replace(" ", "-")) for name in MORE)]
)
def test_a_session_goes_with_its_model(method):
    chosen = METHODS[method] if method in METHODS else MORE[method]
    found = run_ranks(2, lambda rank, group: [dropped(group, rank, chosen) for _ in range(3)])
    assert [alive(refs) for refs in found[0] + found[1]] == [0] * 6


class RefusesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


class RefusesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


@pytest.mark.usefixtures("large_matrices")
@pytest.mark.parametrize("mode", [FakeTensorMode, RefusesFunctions, RefusesOperators])
@pytest.mark.parametrize("method", ["dense", "dad", "two_way", "local steps"])
def test_a_session_may_go_while_a_compiler_traces(mode, method, monkeypatch):
    """Python looks for garbage at any place, also within the modes of others."""
    raised = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda about: raised.append(repr(about.exc_value)))

    def body(rank, group):
        refs = dropped(group, rank, METHODS[method] if method in METHODS else MORE[method])
        with mode():
            wait_for(refs)

    run_ranks(2, body)
    assert raised == []


class Same:
    """A transform that changes nothing."""

    needs_samples = needs_all_layers = forms = False

    def __call__(self, gradient: Any) -> Any:
        return gradient

    def __repr__(self) -> str:
        return "Same()"


SETTINGS: dict[str, dict[str, Any]] = {
    "samples": {"weighting": "samples"},
    "skips bad steps": {"max_bad_steps": 2},
    "verified": {"verify_every": 2, "on_drift": "warn"},
    "transform": {"transform": Same()},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_and_with_every_setting(settings):
    def body(rank, group):
        return dropped(group, rank, og.DAD(always=True), **SETTINGS[settings])

    assert [alive(refs) for refs in run_ranks(2, body)] == [0, 0]


def test_with_a_recorder_that_hears_of_the_end():
    class Heard:
        def __init__(self):
            self.kinds = []

        def record(self, event):
            self.kinds.append(type(event).__name__)

    heard = [Heard(), Heard()]

    def body(rank, group):
        return dropped(group, rank, og.DAD(always=True), recorder=heard[rank])

    assert [alive(refs) for refs in run_ranks(2, body)] == [0, 0]
    assert [one.kinds.count("End") for one in heard] == [1, 1]


def _hooked(model: nn.Module) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_nothing)


def _collect(_: Any) -> None:
    gc.collect()


def _nothing(_: Any) -> None:
    """A hook of somebody else."""


class NoSubclass(nn.Sequential):
    """Whose class cannot be swapped."""

    def __init_subclass__(cls, **_: Any) -> None:
        raise TypeError("no subclass")


MODELS: dict[str, Any] = {
    "root with a rule": lambda: nn.Linear(40, 12),
    "buffers": lambda: nn.Sequential(nn.Linear(40, 12), nn.BatchNorm1d(12)),
    "tied": lambda: _tied(),
    "a parent known to its child": lambda: _known_to_child(),
    "no class swap": lambda: NoSubclass(nn.Linear(40, 12)),
    "hooks of others": lambda: _with_hooks(),
}


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    model[1].weight = model[0].weight
    return model


def _known_to_child() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 12))
    model[0].__dict__["parent"] = model
    return model


def _with_hooks() -> nn.Module:
    model = nn.Sequential(nn.Linear(40, 12))
    _hooked(model)
    return model


@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)], ids=["dense", "dad"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_of_all_kinds_go(kind, method):
    def body(rank, group):
        model = MODELS[kind]()
        session = og.distribute(model, method, group=group)
        train(model, rank)
        return [weakref.ref(model), weakref.ref(session)]

    assert [alive(refs) for refs in run_ranks(2, body)] == [0, 0]


@pytest.mark.parametrize("method", SOME)
def test_who_keeps_the_model_alone_trains_on(method):
    """Whatever Python looks for, and when: also within a backward."""

    def body(rank, group):
        model = net()
        og.distribute(model, METHODS[method], group=group)
        optimizer = sgd(model.parameters())
        model.last.weight.register_hook(_collect)
        for k in range(4):
            gc.collect()
            optimizer.zero_grad()
            loss = loss_of(model, batch(rank, k, 2))
            gc.collect()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    steps = [[(0.5, batch(site, k, 2)) for site in (0, 1)] for k in range(4)]
    assert_close(first, pooled(lambda _, optimizer: optimizer.step(), steps, sgd), 2e-4)


@pytest.mark.parametrize("kept", ["parts", "parameters"])
def test_who_keeps_a_part_alone_trains_on(kept):
    """As of a list of modules that was made for `og.distribute` alone."""

    def body(rank, group):
        first, last = nn.Linear(40, 8), nn.Linear(8, 12)
        with torch.no_grad():
            for p in (*first.parameters(), *last.parameters()):
                p.fill_(0.01)
        og.distribute(nn.ModuleList([first, last]), og.Dense(), group=group)
        params = [first.weight, first.bias, last.weight, last.bias]
        if kept == "parameters":
            del first, last
        gc.collect()
        for k in range(3):
            x = batch(rank, k, 2)
            for p in params:
                p.grad = None
            if kept == "parts":
                last(first(x)).square().sum().backward()
            else:
                linear = nn.functional.linear
                linear(linear(x, *params[:2]), *params[2:]).square().sum().backward()
            gc.collect()
        return [p.grad.clone() for p in params]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))
    assert all(g.abs().sum() > 0 for g in first)


def test_a_conversion_is_seen_behind_a_look_for_garbage():
    def body(rank, group):
        model = net()
        og.distribute(model, og.Dense(), group=group)
        train(model, rank)
        gc.collect()
        model.double()
        with pytest.raises(RuntimeError, match="was replaced or converted"):
            loss_of(model, batch(rank, 4, 2).double()).backward()

    run_ranks(2, body)


def test_join_counts_the_living_alone():
    def body(rank, group):
        wait_for(dropped(group, rank, og.DAD(always=True)))
        model = net()
        session = og.distribute(model, og.DAD(always=True), group=group)
        with session.join():
            train(model, rank, steps=1 + rank)
        assert session.stats().step == 2

    run_ranks(2, body)


def test_a_site_that_drops_its_session_says_what_it_owes(caplog):
    """The other one compares what both received by what is left of the first."""

    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(always=True), group=group)
        train(model, rank)
        if rank == 0:
            refs = [weakref.ref(model), weakref.ref(session)]
            del model, session
            wait_for(refs)
            return None
        session.detach()
        return None

    gc.collect()  # what other tests have left says the same of itself
    with caplog.at_level(logging.WARNING, logger="outergrad"):
        run_ranks(2, body, timedelta(seconds=5))
    told = [r.getMessage() for r in caplog.records]  # sessions of other tests may be among them
    owes = "without session.detach(): this site has not compared what the sites received in"
    assert f"site 0: a session and its model were given up {owes} the steps 1 to 2" in told
    assert f"site 1: a session and its model were given up {owes} the steps 1 to 2" not in told


def test_who_still_waits_for_a_site_that_dropped_its_session_does_not_hang():
    def body(rank, group):
        model = net()
        session = og.distribute(model, og.DAD(always=True), group=group, timeout=2.0)
        train(model, rank)
        if rank == 0:
            refs = [weakref.ref(model), weakref.ref(session)]
            del model, session
            wait_for(refs)
            return "gone"
        train(model, rank, steps=1, first=3)
        return "went on"

    first, second = try_ranks(2, body, timedelta(seconds=5))
    assert first == "gone"
    assert isinstance(second, og.SiteLostError)
    assert "site 0 left word that its session had ended, after 3 steps" in str(second)


def test_on_a_star():
    def body(comm):
        model = net()
        session = attach(model, og.DAD(always=True), comm, Link(1e9, 0.0))
        train(model, comm.rank)
        refs = [weakref.ref(model), weakref.ref(session)]
        del model, session
        wait_for(refs)
        return True

    assert comms_on_star(2, body, 20.0) == [True, True]
