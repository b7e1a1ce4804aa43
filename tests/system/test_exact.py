"""Every case by every kind of method at one to four sites against a float64 pooled reference.

Each case goes by a method of each kind at two sites; in slow tests by a sixth of the methods alone,
at three or at four. OUTERGRAD_LONG=1 runs all.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

import outergrad as og
from cases import EVERY, KINDS, SHARED_STREAM, Case, build, in_turn, pooled, relative_error, run
from covering import covering
from outergrad.layers import rule_for
from ranks import run_on_lasting_groups
from seeding import seed

CASES = build()
STEPS = 3
RULES = og.RULES.values()
ALL_METHODS = {
    named
    for named in (getattr(og, name) for name in og.__all__)
    if isinstance(named, type) and named.__module__.startswith("outergrad.methods.")
}
NOT_EXACT = {og.Schedule, og.LocalSteps, og.Local, og.PerLayer}
"""Does what its methods do in turn; shares weights; shares nothing; does what its parts do."""
SIXTHS = [list(EVERY)[k::6] for k in range(6)]


def by_sixths(*sites: int) -> dict[str, Any]:
    """Numbers of sites, each with a sixth of the methods."""
    return {f"{n}, sixth {k}": (n, sixth) for n in sites for k, sixth in enumerate(SIXTHS)}


def rarely(number: int, name: str) -> list[Any]:
    """Every other case is slow, but for the only one of its rule."""
    return [pytest.mark.slow] if number % 2 and name != "conv1d" else []


PAIRS = [
    *(
        pytest.param(name, (2, in_turn(k // 2 + k % 2)), id=f"{name}-2", marks=rarely(k, name))
        for k, name in enumerate(CASES)
    ),
    *covering(CASES.keys(), by_sixths(1, 3, 4), quick=0, every=18),
]


def shared_gradients(case: Case, sites: int, methods: Iterable[str]):
    """Per site and method, gradients after steps without a plan, with and without a header."""

    def body(rank, group):
        return {label: train(case, EVERY[label], rank, group) for label in methods}

    return run_on_lasting_groups(sites, body)


def train(case: Case, method, rank: int, group):
    model = copy.deepcopy(case.model)
    session = og.distribute(model, method, group=group)
    for _ in range(STEPS):
        model.zero_grad()
        seed(7)
        run(model, case, case.batches[rank]).backward()
    session.detach()
    return {name: p.grad for name, p in model.named_parameters()}


def ddp_gradients(case: Case, sites: int):
    """What PyTorch's own DDP leaves."""

    def body(rank, group):
        model = copy.deepcopy(case.model)
        wrapped = nn.parallel.DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True
        )
        seed(7)
        run(wrapped, case, case.batches[rank]).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return run_on_lasting_groups(sites, body)[0]


def test_no_rule_and_no_method_is_left_out():
    """Of those that are not slow, which are at two sites: each rule goes by every kind."""
    by_rule: dict[int, set[str]] = defaultdict(set)
    for name, (_, methods) in (pair.values for pair in PAIRS if not pair.marks):
        for module in CASES[name]().model.modules():
            by_rule[id(rule_for(module, og.RULES)[0])].update(methods)
    for rule in RULES:
        assert all(by_rule[id(rule)] & {*kind} for kind in KINDS), rule
    assert set.union(*by_rule.values()) == {label for kind in KINDS for label in kind} == {*EVERY}
    assert {type(method) for method in EVERY.values()} == ALL_METHODS - NOT_EXACT


@pytest.mark.parametrize(("name", "where"), PAIRS)
def test_gradients_equal_the_pooled_ones(name, where):
    sites, methods = where
    if name in SHARED_STREAM and sites > 1:
        pytest.skip("threads share one random stream")
    case = CASES[name]()
    expected = pooled(case, sites)
    by_ddp = ddp_gradients(case, sites)
    for rank, found in enumerate(shared_gradients(case, sites, methods)):
        for label, gradients in found.items():
            for parameter, gradient in gradients.items():
                error = relative_error(gradient, expected[parameter])
                by_peer = relative_error(by_ddp[parameter], expected[parameter])
                told = f"{label}, rank {rank}, {parameter}: {error:.1e}, DDP {by_peer:.1e}"
                assert error < 5e-6, told
                assert error <= 2 * by_peer + 6e-8, told
