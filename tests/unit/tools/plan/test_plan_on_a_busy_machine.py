"""Plans on a busy machine and on an idle one agree, or one of them says that it cannot tell."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outergrad.comm.cost import Collective
from outergrad.comm.trace import Awaited, Started, Trace, Tracer
from outergrad.core.cost import Traffic
from outergrad.launch.links import ShapedLink
from outergrad.record.stats import Stats
from outergrad.tools.commands.app import app
from outergrad.tools.plan import measure
from outergrad.tools.plan.forecast import Forecast, Question, forecast
from outergrad.tools.plan.measure import Planned, Turn, forms_gradients, method_of, repeat
from outergrad.tools.plan.network import network_of
from outergrad.tools.plan.verdict import Pays, Verdict, verdicts

MB = 1_000_000
NETWORK = network_of("torch", 2)
METHODS = {
    # Seconds of computing on an idle machine, and megabytes.
    "dense": (0.200, 12.0),
    "dad": (0.201, 12.0),
    "edad": (0.260, 8.0),
    "rank-dad-1": (0.205, 0.1),
    "rank-dad-4": (0.230, 0.3),
}
Noise = Callable[[random.Random], tuple[float, float]]
"""Draws by how much longer a step takes, and by how much longer the thread has a processor."""


def idle(draw: random.Random) -> tuple[float, float]:
    longer = 1 + draw.expovariate(200)
    return longer, longer


def interrupted(draw: random.Random) -> tuple[float, float]:
    """Now and then another program has the processor."""
    used = 1 + draw.expovariate(100)
    return used + draw.choice([0, 0, 0, 3 * draw.random()]), used


def busy(draw: random.Random) -> tuple[float, float]:
    """Others have it most of the time, and what they do slows down this program's share, too."""
    used = 1 + 0.25 * draw.random()
    return used * draw.uniform(2, 5), used


NOISES: dict[str, Noise] = {"idle": idle, "interrupted": interrupted, "busy": busy}


def trace(method: str, noise: Noise, draw: random.Random) -> Trace:
    compute_s, megabytes = METHODS.get(method, (0.2, 0))
    took, used = (compute_s * factor for factor in noise(draw))
    sent = Traffic(int(megabytes * MB), int(megabytes * MB))
    total = Traffic(2 * sent.sent, 2 * sent.received)
    message = Started(0.9 * took, Collective.ALL_GATHER, sent, total)
    events = (message, Awaited(took, 0)) if sent.sent else ()
    return Trace(events, took, used)


def looked(noise: Noise, seed: int, *, rate: float, threads: int, rounds: int = 12) -> Forecast:
    """The forecast of made-up measurements."""
    draw = random.Random(seed)
    question = Question(
        model="mlp", link=ShapedLink(rate_bit_per_s=rate), methods=tuple(METHODS), seconds=rounds
    )
    alone = Planned("alone", True, NETWORK)
    exact = ("dense", "dad", "edad")
    methods = [Planned(name, name in exact, NETWORK) for name in METHODS]
    none: Any = SimpleNamespace()
    found = Forecast(question=question, subject=none, alone=alone, methods=methods, inspected=none)

    def turn(one: Planned) -> None:
        pairs = [(trace(one.method, noise, draw), trace(one.method, noise, draw)) for _ in "ab"]
        sent = int(MB * METHODS.get(one.method, (0, 0))[1])
        one.turns.append(Turn(pairs, threads, Stats(sent_bytes=sent), "its gradient"))

    now = iter(range(10**6))
    turns = [lambda one=one: turn(one) for one in [alone, *methods]]
    repeat(turns, rounds, found.is_settled, lambda: float(next(now)))
    return found


def agree(one: Verdict, other: Verdict) -> bool:
    """True if no verdict says what the other denies."""
    named = [{lead.method for lead in v.leaders} for v in (one, other)]
    if one.is_told and other.is_told and named[0] != named[1]:
        return False
    pays = {v.pays for v in (one, other) if not v.has_dense} - {Pays.UNTOLD}
    return bool(named[0] & named[1]) and len(pays) <= 1


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e10])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("noise", NOISES)
def test_no_noise_changes_what_an_idle_machine_tells(noise, threads, rate):
    truth = verdicts(looked(idle, 0, rate=rate, threads=threads).comparison)
    for seed in range(1, 9):
        found = verdicts(looked(NOISES[noise], seed, rate=rate, threads=threads).comparison)
        for one, other in zip(truth, found, strict=True):
            assert agree(one, other), (seed, one, other)


def test_low_rank_pays_on_a_busy_machine_too():
    """Where the link decides, noise of the computing hides nothing: users had read 1.1 x dense."""
    for seed in range(5):
        _, approximate = verdicts(looked(busy, seed, rate=1e8, threads=1).comparison)
        assert approximate.pays == Pays.FASTER


def test_what_forms_all_gradients_computes_no_less_than_training_alone():
    """Low rank may: it multiplies thin matrices instead."""
    names = ("dense", "dad", "edad", "og-powersgd:rank=4", "sparse:density=0.1", "rank-dad-1")
    forms = [name for name in names if forms_gradients(method_of(name))]
    assert forms == [*names[:-1]]
    alone, turn = Planned("alone", True, NETWORK), Turn([(trace("x", idle, random.Random(0)),) * 2])
    alone.turns.append(turn)
    quick = Turn([(Trace((), 0.1, 0.1),) * 2])
    assert Planned("dad", True, NETWORK, alone, [quick]).compute_s == alone.compute_s
    assert Planned("rank-dad-1", False, NETWORK, None, [quick]).compute_s.high < 0.21


def test_an_idle_machine_is_sure_after_few_rounds():
    found = looked(idle, 0, rate=1e8, threads=1)
    exact, approximate = verdicts(found.comparison)
    assert [one.method for one in exact.leaders] == ["edad"]
    assert [one.method for one in approximate.leaders] == ["rank-dad-1"]
    assert len(found.alone.turns) == 3


def test_steps_are_repeated_until_the_time_is_over_where_nothing_is_clear():
    assert len(looked(busy, 0, rate=1e8, threads=2, rounds=30).alone.turns) == 30


def test_each_round_begins_with_another_candidate():
    told: list[int] = []
    turns = [lambda k=k: told.append(k) for k in range(3)]
    assert repeat(turns, 100, lambda: True) == 3
    assert [told[k : k + 3] for k in (0, 3, 6)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


class Stalls:
    """A clock that jumps ahead at times, as while another program has the processor."""

    def __init__(self, seed: int) -> None:
        self._draw, self._stalled_s = random.Random(seed), 0.0

    def __call__(self) -> float:
        if self._draw.random() < 0.1:
            self._stalled_s += self._draw.expovariate(1 / 0.02)
        return time.perf_counter() + self._stalled_s


def test_steps_of_a_real_model_by_a_noisy_clock(monkeypatch):
    question = Question(
        model="mlp",
        rows=2,
        link=ShapedLink(rate_bit_per_s=1e7),
        methods=("dad", "rank-dad-1"),
        seconds=1.0,
    )
    calm = forecast(question, lambda _: None)
    monkeypatch.setattr(measure, "Tracer", lambda: Tracer(clock=Stalls(3)))
    noisy = forecast(question, lambda _: None)
    assert measure.busy_share(noisy.methods) > 0.1
    for one, other in zip(verdicts(calm.comparison), verdicts(noisy.comparison), strict=True):
        assert agree(one, other)
        assert other.pays == Pays.FASTER
    exact, _ = verdicts(noisy.comparison)
    assert [one.method for one in exact.leaders] == ["dad"]


@pytest.mark.slow
@pytest.mark.alone
def test_two_programs_beside_it_change_no_verdict(tmp_path):
    def planned(name: str) -> list[str]:
        path = tmp_path / f"{name}.json"
        args = ["plan", "--seconds", "10", "--threads", "1", "--link", "10mbit"]
        result = CliRunner().invoke(app, [*args, "--json", str(path)])
        assert result.exit_code == 0, result.stderr
        return json.loads(path.read_text())["verdict"]

    calm = planned("calm")
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        loaded = planned("loaded")
    finally:
        for process in load:
            process.kill()
            process.wait()
    for before, after in zip(calm[:2], loaded[:2], strict=True):
        told = [line.split(", ")[0] for line in (before, after) if "is the fastest" in line]
        assert len(set(told)) <= 1
        assert "x as fast as dense" in before
        assert "x as fast as dense" in after
