"""Random module graphs by random methods: gradients equal the pooled ones, bytes as planned."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from fuzz.nodes import Net
from fuzz.plays import Expected, Gradients, Real, Refused
from fuzz.programs import EXACT, LOW_RANK, Program, programs
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from torch import Tensor

import outergrad as og
from covering import LONG
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Tracer
from outergrad.core.types import Link
from outergrad.session.attach import attach
from ranks import run_on_lasting_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
]

LINK = Link(delay_s=1e-3, bytes_per_s=1e9)
EXAMPLES = int(os.environ.get("OUTERGRAD_FUZZ", "0"))
"""How many examples each test tries at random; without, some that are always the same."""


PLANNED = EXACT | {name: m for name, m in LOW_RANK.items() if not getattr(m, "tolerance", 0)}
"""With a tolerance the bytes follow from the numbers, which mirrors do not have of each other."""


def fuzzed(count: int):
    """Settings of a test with so many examples, or half as many without OUTERGRAD_LONG=1."""
    return settings(
        max_examples=EXAMPLES or (count if LONG else count // 2),
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
        print_blob=False,
        report_multiple_bugs=False,
    )


def expected_of(program: Program, **kwargs: Any):
    """What plain PyTorch makes of a program; one that PyTorch refuses is not tried."""
    try:
        with torch.random.fork_rng():
            return list(Expected(program, **kwargs).play())
    except (RuntimeError, ValueError) as error:
        event(f"PyTorch refuses: {str(error)[:40]}")
        assume(False)
        raise AssertionError from error


class Told(NamedTuple):
    """What a site has after a step."""

    gradients: Gradients
    stats: list[Any]
    residual: dict[str, Tensor]
    void: bool


def built(program: Program) -> list[Net]:
    with torch.random.fork_rng():
        return [graph.build() for graph in program.nets]


def played(program: Program, *, alike: bool = False) -> list[list[Told]]:
    """Per site and step, the gradients, and what the sessions say."""
    nets = built(program)

    def body(rank, group):
        try:
            args = program, rank, nets, lambda net, m: og.distribute(net, m, group=group)
            real = Real(*args, alike=alike)
        except Refused as refused:
            return str(refused)
        found = [
            Told(grads, [s.stats() for s in sessions], residual_of(sessions), real.void)
            for grads, sessions in real.play()
        ]
        real.detach()
        return found

    results = run_on_lasting_groups(program.sites, body)
    if isinstance(results[0], str):
        assert results == results[:1] * program.sites
        event("refused")
        assume(False)
    for step, sites in zip(program.steps, zip(*results, strict=True), strict=True):
        if step.passes[-1].sync:
            assert len({site.void for site in sites}) == 1, "all sites discard a step or none does"
    return results


def residual_of(sessions: list[og.Session]) -> dict[str, Tensor]:
    """What a site remembers of every parameter."""
    found: dict[str, Tensor] = {}
    for k, session in enumerate(sessions):
        for state in session._exchange.compressors.states():
            memories = state.get("own", {}).get("memories", {})
            for place, memory in memories.items():
                name, _, rows = place.partition("[")
                p = session._exchange.model.params[name]
                whole = found.setdefault(f"{k}.{name}", torch.zeros(p.shape, dtype=torch.double))
                start, _, stop = rows.rstrip("]").partition(":")
                part = whole[slice(int(start), int(stop))] if rows else whole
                if "unsent" in memory:
                    part += memory["unsent"].double().reshape(part.shape)
                elif "unsent_deltas" in memory:
                    d, a = memory["unsent_deltas"].double(), memory["unsent_activations"].double()
                    part += (d.mT @ a).reshape(part.shape)
    return found


def precision(program: Program) -> float:
    """The relative error of one rounding; canonical factors leave out what is below 1e-10."""
    eps = {"float32": 2.0**-23, "float64": 2.0**-52, "autocast": 2.0**-7}[program.nets[0].dtype]
    canonical = any(
        getattr(part, "reveal", "") == "gradient" or getattr(part, "inputs", "") == "canonical"
        for part in program.parts
    )
    return max(eps, 1e-10) if canonical else eps


@fuzzed(60)
@given(programs())
def test_gradients_equal_the_pooled_ones(program):
    """And are the same to the bit on all sites, whatever became of the steps before."""
    expected = list(pooled(program))
    found = played(program)
    for number, (means, allowed) in enumerate(expected):
        if any(site[number].void for site in found):
            continue
        for rank, site in enumerate(found):
            for name, gradient in site[number].gradients.items():
                where = f"step {number}, rank {rank}, {name}"
                error = distance(gradient, means[rank][name])
                assert error <= allowed[rank][name], f"{where}: {error} > {allowed[rank][name]}"
                if all(mean[name] is means[0][name] for mean in means):
                    assert same(gradient, found[0][number].gradients[name]), where
        check_bytes([site[number] for site in found], program)


def pooled(program: Program):
    """Of each step that counts, what the gradients should be, and how far off they may be.

    The same computed by PyTorch alone in the program's own dtypes, and from weights that are a
    rounding error off, tells how much a rounding error matters; beside that, sixteen are allowed
    for each of what is added up.
    """
    eps = precision(program)
    exact = expected_of(program, double=True)
    others = expected_of(program, double=False), expected_of(program, double=True, nudge=eps)
    for (means, sizes), *rest in zip(exact, *others, strict=True):
        allowed = []
        for rank, mean in enumerate(means):
            errors = {n: max(distance(o[0][rank][n], m) for o in rest) for n, m in mean.items()}
            allowed.append({n: 16 * (errors[n] + eps * sizes[n]) for n in mean})
        yield means, allowed


def check_bytes(sites: list[Told], program: Program) -> None:
    """What is sent is received, and what is booked on layers is all but headers."""
    for k in range(len(program.nets)):
        stats = [site.stats[k] for site in sites]
        assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats)
        for s in stats:
            assert 0 <= sum(layer.sent_bytes for layer in s.layers.values()) <= s.sent_bytes
            assert 0 <= sum(layer.received_bytes for layer in s.layers.values()) <= s.received_bytes


@fuzzed(30)
@given(programs(alike=True, table=PLANNED))
def test_plans_foresee_what_sites_send(program):
    """To the byte, per layer and step, where all sites have the same batches."""
    expected_of(program, double=False, alike=True)
    found = played(program, alike=True)
    tracer = Tracer()
    comms = [MirrorComm(program.sites, tracer) for _ in program.nets]
    nets = built(program)
    pairs = iter(comms)

    def mirrored(net: Any, method: Any) -> og.Session:
        return attach(net, method, next(pairs), LINK, buffers="broadcast")

    planned = Real(program, 0, nets, mirrored, alike=True)
    for number, (_, sessions) in enumerate(planned.play()):
        for k, session in enumerate(sessions):
            plan, stats = session.stats(), found[0][number].stats[k]
            assert booked(plan) == booked(stats), f"step {number}"
            assert plan.sent_bytes == stats.sent_bytes, f"step {number}"
    planned.detach()


def booked(stats: Any) -> dict[str, Any]:
    return {name: (v.travels, v.sent_bytes, v.kept_rows) for name, v in stats.layers.items()}


@fuzzed(30)
@given(programs(table=LOW_RANK, dtypes=("float32", "float32", "float64"), once=True))
def test_what_low_rank_leaves_out_is_remembered(program):
    """What was applied and the mean residual are the sum of the mean gradients."""
    expected = list(pooled(program))
    found = played(program)
    sums: dict[str, Tensor] = {}
    room: dict[str, float] = {}
    for number, (means, allowed) in enumerate(expected):
        if any(site[number].void for site in found):
            continue
        shared = [n for n in means[0] if all(m[n] is means[0][n] for m in means)]
        for name in shared:
            for site in found:
                assert same(site[number].gradients[name], found[0][number].gradients[name]), name
            if means[0][name] is not None:
                got = found[0][number].gradients[name]
                sums[name] = sums.get(name, 0) + means[0][name] - got.double()
                room[name] = room.get(name, 0.0) + allowed[0][name]
    for name, missing in sums.items():
        residual = sum(site[-1].residual.get(name, 0.0) for site in found) / program.sites
        error = (missing - residual).norm().item()
        assert error <= room[name], f"{name}: {error} > {room[name]}"


def distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return (a.double() - b.double()).norm().item()


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.equal(b)
