"""Replicas that drift apart are found out within n steps, told of, and mended where asked."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import outergrad as og
from cases import mlp
from covering import covering
from outergrad.comm.torch import TorchComm
from outergrad.comm.words import words_of_all
from outergrad.session.drift import compared
from ranks import run_on_lasting_groups, run_ranks

N, STEPS, BAD = 3, 10, 4
"""Compared every N steps; one site goes astray behind step BAD, which is seen after step 6."""
SEEN = 6
METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(always=True),
    "rank-dad two ways": og.RankDAD(rank=2, reduce="two_way"),
    "rank-dad sides in turn": og.RankDAD(rank=2, reduce="alternate"),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
    "sparse": og.Sparse(density=0.05, always=True),
    "sparse random": og.Sparse(density=0.05, select="random", always=True),
    "blocks": og.EDAD(blocks=["0"], inputs="raw", always=True),
}
torch.manual_seed(5)
MODEL = nn.Sequential(mlp(6, 24, 24), nn.BatchNorm1d(24), nn.Linear(24, 4))
NAME = "0.2.weight"


class Recorded:
    every = 1000

    def __init__(self) -> None:
        self.mishaps: list[Any] = []

    def record(self, event: Any) -> None:
        if isinstance(event, og.events.Mishap):
            self.mishaps.append((event.what, event.step, event.sites, event.layer))


class Training:
    """One site's; the last site goes astray by a millionth."""

    def __init__(self, rank: int, group: Any, sites: int, method: Any, **options: Any) -> None:
        self.model, self.rank, self.astray = copy.deepcopy(MODEL), rank, rank == sites - 1
        self.recorded = Recorded()
        own = {"group": group, "recorder": self.recorded, "verify_every": N}
        self.session = og.distribute(self.model, method, **own, **options)
        self.optimizer = Adam(self.model.parameters(), lr=0.01)
        self.generator = torch.Generator().manual_seed(rank)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6, generator=self.generator)).square().mean().backward()

    def step(self, number: int) -> None:
        self.backward()
        self.optimizer.step()
        if number == BAD and self.astray:
            with torch.no_grad():
                self.model.get_parameter(NAME).view(-1)[3] += 1e-6

    def state(self) -> list[Tensor]:
        held = [t for s in self.optimizer.state.values() for t in s.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *held)]


def assert_alike(states: list[list[Tensor]]) -> None:
    for other in states[1:]:
        assert all(map(torch.equal, states[0], other))


@pytest.mark.parametrize(("name", "sites"), covering(list(METHODS), [2, 3], quick=4, every=2))
def test_a_drift_is_told_on_all_sites_in_the_same_words(name, sites):
    """Where a block is computed again, gradients below it may go astray, too."""
    firsts = ["0.0.weight", NAME] if name == "blocks" else [NAME]

    def body(rank, group):
        training = Training(rank, group, sites, METHODS[name])
        for number in range(1, SEEN):
            training.step(number)
        with pytest.raises(og.DriftError) as caught:
            training.backward()
        error = caught.value
        assert (error.sites, error.step) == ((sites - 1,), SEEN)
        assert error.parameter in firsts
        assert all(p.grad is not None for p in training.model.parameters())
        assert training.session.make_equal()
        assert not training.session.make_equal()
        training.optimizer.step()
        for number in range(SEEN + 1, STEPS):
            training.step(number)
        training.session.detach()
        return str(error), training.recorded.mishaps, training.state()

    results = run_on_lasting_groups(sites, body)
    (told, mishaps, _), *others = results
    assert all((other[0], other[1]) == (told, mishaps) for other in others)
    ((what, step, who, first),) = mishaps
    assert (what, step, who) == ("drifted", SEEN, (sites - 1,))
    assert f"site {sites - 1} has another {first!r} than site 0" in told
    assert "session.make_equal() on every site" in told
    assert_alike([state for *_, state in results])


def test_the_one_parameter_that_differs_is_named():
    """With an optimizer that goes by each number alone, no other is touched until it is seen."""

    def body(rank, group):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        og.distribute(model, group=group, verify_every=1)
        if rank == 1:
            model[1].bias.data[1] = 7.0
        with pytest.raises(og.DriftError) as caught:
            model(torch.ones(2, 4)).sum().backward()
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "site 1 has another '1.bias' than site 0; 1 of 4 parameters and buffers differ" in first


@pytest.mark.parametrize("name", covering(list(METHODS), quick=3))
def test_a_drift_is_mended_where_asked(name):
    def body(rank, group):
        training = Training(rank, group, 3, METHODS[name], on_drift="mend")
        for number in range(1, STEPS):
            training.step(number)
        training.session.detach()
        return training.state(), training.recorded.mishaps

    with pytest.warns(RuntimeWarning, match="differ after step 6: site 2 .* take the first one's"):
        results = run_on_lasting_groups(3, body)
    assert_alike([state for state, _ in results])
    for _, mishaps in results:
        assert [mishap[:3] for mishap in mishaps] == [("drifted", SEEN, (2,))]


def test_a_warning_is_all_that_comes_of_it_where_asked():
    def body(rank, group):
        training = Training(rank, group, 2, og.Dense(), on_drift="warn")
        for number in range(1, STEPS):
            training.step(number)
        training.session.detach()
        return training.state(), training.recorded.mishaps

    with pytest.warns(RuntimeWarning, match=r"the replicas differ after step \d: site 1 has"):
        (state, mishaps), (other, _) = run_on_lasting_groups(2, body)
    assert not all(map(torch.equal, state, other))
    assert [(what, step) for what, step, *_ in mishaps] == [("drifted", 6), ("drifted", 9)]


def test_what_is_a_sites_own_may_differ():
    def body(rank, group):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        method = og.PerLayer({"0.*": og.Local(), "1.*": og.Local(), "*": og.DAD()})
        session = og.distribute(model, method, group=group, verify_every=1)
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
        assert not session.make_equal()
        session.detach()
        return model[0].weight.detach().clone()

    first, second = run_on_lasting_groups(2, body)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", ["broadcast", "mean", "local"])
def test_running_statistics_do_not_drift(kind):
    """Also with a step that is discarded between, and evaluation."""

    def body(rank, group):
        training = Training(rank, group, 5, og.DAD(), buffers=kind)
        for number in range(1, STEPS):
            training.step(number)
            training.model.eval()(torch.randn(3, 6))
            training.model.train()
        training.session.detach()
        return training.recorded.mishaps

    assert run_on_lasting_groups(3, body) == [[]] * 3


def test_a_cadence_is_verified_when_it_shares():
    def body(rank, group):
        method = og.PerLayer({"0.*": og.Dense(every=2), "*": og.DAD()})
        training = Training(rank, group, 2, method)
        for number in range(1, SEEN):
            training.step(number)
        with pytest.raises(og.DriftError, match="site 1 has another"):
            training.backward()
        training.session.detach()

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize("on_drift", ["raise", "mend"])
def test_local_steps_are_verified_at_their_exchanges(on_drift):
    """What the last exchange left, which all sites have in common, and the outer optimizer."""

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        outer = lambda params: SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # noqa: E731
        method = og.LocalSteps(2, outer=outer)
        options = {"group": group, "verify_every": 2, "on_drift": on_drift}
        session = og.distribute(model, method, **options)
        optimizer, found = SGD(model.parameters(), lr=0.05), []
        for number in range(1, 13):
            optimizer.zero_grad()
            model(torch.randn(5, 6)).square().mean().backward()
            try:
                optimizer.step()
            except og.DriftError as error:
                found.append((number, error.sites))
            if number == 5 and rank == 1:
                with torch.no_grad():
                    session._updates.outer.start[NAME].view(-1)[0] += 1e-6
        with pytest.raises(RuntimeError, match="weights of its own between two exchanges"):
            session.make_equal()
        session.detach()
        return found, [p.detach().clone() for p in model.parameters()]

    warnings.filterwarnings("ignore", "the replicas differ")
    (found, first), (other, second) = run_on_lasting_groups(2, body)
    assert found == other == ([(8, (1,)), (12, (1,))] if on_drift == "raise" else [])
    assert all(map(torch.equal, first, second)) == (on_drift == "mend")


@pytest.mark.parametrize("on_drift", ["raise", "mend"])
def test_loops_of_unequal_length_are_verified(on_drift):
    """Also by the site that has run out."""

    def body(rank, group):
        training = Training(rank, group, 2, og.DAD(), on_drift=on_drift)
        error = None
        try:
            with training.session.join():
                for number in range(1, 6 if rank else STEPS):
                    training.step(number)
        except og.DriftError as raised:
            error = raised.step
        training.session.detach()
        return error, training.state()

    warnings.filterwarnings("ignore", "the replicas differ")
    results = run_on_lasting_groups(2, body)
    assert [error for error, _ in results] == [SEEN if on_drift == "raise" else None] * 2
    if on_drift == "mend":
        assert_alike([state for _, state in results])


def test_make_equal_takes_optimizers_that_are_passed():
    def body(rank, group):
        model = nn.Linear(4, 3)
        session = og.distribute(model, group=group)
        optimizer = Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        if rank == 1:
            optimizer.state[model.bias]["exp_avg"] += 1.0
        assert session.make_equal(optimizer)
        session.detach()
        return optimizer.state[model.bias]["exp_avg"]

    first, second = run_on_lasting_groups(2, body)
    assert torch.equal(first, second)
    assert not (first > 0.9).any()


def test_it_costs_nothing_until_it_is_due():
    def body(rank, group):
        sent = []
        for every in (None, 4):
            model = copy.deepcopy(MODEL)
            session = og.distribute(model, group=group, verify_every=every)
            before = session.stats().total_sent_bytes
            for _ in range(4):
                model(torch.ones(5, 6)).square().mean().backward()
            sent.append((session.stats().total_sent_bytes - before, session._at.comm.sent_bytes))
            session.detach()
        (never, _), (sometimes, whole) = sent
        assert never == sometimes
        assert whole == sent[0][1] + 8  # one word to the other site

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verify_every": 0}, "verify_every=0: pass a number of steps"),
        ({"verify_every": 2.5}, "verify_every=2.5"),
        ({"verify_every": 2, "on_drift": "ignore"}, "on_drift='ignore': pass one of raise"),
    ],
)
def test_settings_are_checked(options, words):
    def body(rank, group):
        with pytest.raises(ValueError, match=words):
            og.distribute(nn.Linear(2, 2), group=group, **options)

    run_on_lasting_groups(2, body)


def test_sites_must_compare_after_the_same_steps():
    def body(rank, group):
        with pytest.raises(ValueError, match="verify_every: 2, on_drift: raise"):
            og.distribute(nn.Linear(2, 2), group=group, verify_every=1 + rank)

    run_on_lasting_groups(2, body)


def test_every_dtype_and_layout_is_compared():
    makes = [
        lambda x: x.to(torch.float64),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.to(torch.complex64),
        lambda x: x > 0,
        lambda x: (10 * x).to(torch.int16),
        lambda x: x.t(),
        lambda x: x.view(1, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda x: x[0, 0],
        lambda x: x[:0],
    ]
    x = torch.randn(3, 4)

    def body(rank, group):
        comm = TorchComm(group, torch.device("cpu"))
        tensors = {str(k): make(x.clone()) for k, make in enumerate(makes)}
        of_all, groups = partial(words_of_all, comm), [range(2)]
        assert compared(of_all, tensors, groups, str) is None
        found = []
        for name, t in tensors.items():
            if t.numel():
                other = t.clone()
                if rank == 1:
                    other[(0,) * t.dim()] = ~other[(0,) * t.dim()] if t.dtype == torch.bool else 9
                drift = compared(of_all, {**tensors, name: other, "missing": None}, groups, str)
                found.append(drift is not None and (drift.names, drift.sites) == ((name,), (1,)))
        return found

    assert run_on_lasting_groups(2, body) == [[True] * 8] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="a processor with one way to round"
)
def test_processors_that_round_differently_are_found_out(tmp_path):
    """One site keeps to the oldest instructions; nobody touches a parameter here."""
    store = (tmp_path / "store").as_uri()
    script = Path(__file__).with_name("drifting_site.py")
    oldest = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), store],
            env={**os.environ, "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", **oldest} if rank else None,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (process.communicate(timeout=250)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert first == second
    raised, _, mended, _ = first.splitlines()
    for told in (raised, mended):
        assert "the replicas differ after step 4: site 1 has another '0.weight' than site 0" in told
