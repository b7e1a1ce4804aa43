"""What every method must do, those of the library and one of another's own.

Most is asked of the compressors themselves, with the messages between them but without a session.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from examples.signs import Signs
from torch import Tensor, nn

import outergrad as og
from asking import (
    ROWS,
    SITES,
    Asked,
    asked,
    compressed,
    count,
    exchange_of,
    flat,
    inheritance,
    network,
    piece,
)
from cases import build, relative_error
from covering import rest_slow
from outergrad.core.coding import Encoded, Field, encode
from outergrad.core.compressor import Compressor
from outergrad.core.payload import Payload
from outergrad.core.types import Route, Unit
from outergrad.linalg.gradients import as_tensor
from outergrad.messages.layout import Layout
from outergrad.messages.wire import Piece
from outergrad.session.inspect import inspect
from ranks import run_on_lasting_groups
from watched import Watched, residuals

EXACT = {
    "dad": og.DAD(always=True),
    "dad, raw rows": og.DAD(always=True, reveal="activations"),
    "dad, where it pays": og.DAD(),
    "edad": og.EDAD(always=True),
}
REMEMBERS_ALL = {
    "rank-dad, gathered": og.RankDAD(rank=2, reduce="gather", error_feedback="dense"),
    "rank-dad, alternating": og.RankDAD(rank=2, reduce="alternate", error_feedback="dense"),
    "rank-dad, two-way": og.RankDAD(rank=2, reduce="two_way", error_feedback="dense"),
    "rank-dad, all-reduced": og.RankDAD(rank=2, reduce="all_reduce", error_feedback="dense"),
    "rank-dad, int8": og.RankDAD(
        rank=2, reduce="gather", error_feedback="dense", wire=og.wire.Int8()
    ),
    "powersgd": og.PowerSGD(rank=2, min_ratio=1),
    "sparse, threshold": og.Sparse(density=0.1, always=True),
    "sparse, topk": og.Sparse(density=0.1, select="topk", always=True),
    "sparse, blocks": og.Sparse(density=0.1, select="blocks", block=4, always=True),
    "sparse, random": og.Sparse(density=0.1, select="random", always=True),
    "sparse, random blocks": og.Sparse(density=0.1, select="random_blocks", block=4, always=True),
    "sparse, signs": og.Sparse(
        density=0.1, select="random_blocks", block=4, wire=og.wire.Sign(), always=True
    ),
    "sparse, signs, two ways": og.Sparse(
        density=0.1,
        select="random_blocks",
        block=4,
        wire=og.wire.Sign(),
        vectors=og.wire.Sign(),
        reduce="two_way",
        always=True,
    ),
    "sparse, all in signs": og.Sparse(
        density=0.1, wire=og.wire.Sign(), vectors=og.wire.Sign(), always=True
    ),
    "sparse, bf16": og.Sparse(density=0.1, wire=og.wire.BF16(), always=True),
    "sparse, warm-up": og.Sparse(density=0.1, warmup=3, always=True),
    "signs": Signs(),
}
OTHERS = {
    "rank-dad": og.RankDAD(rank=2),
    "rank-dad, tolerance": og.RankDAD(rank=4, tolerance=0.3, reduce="gather"),
    "rank-dad, nothing kept": og.RankDAD(rank=2, error_feedback=None),
    "sparse, nothing kept": og.Sparse(density=0.1, error_feedback=False, always=True),
    "sparse, momentum": og.Sparse(density=0.1, momentum=0.9, always=True),
}
METHODS: dict[str, Any] = {**EXACT, **REMEMBERS_ALL, **OTHERS}
QUICK = {
    *("dad", "edad", "rank-dad, gathered", "rank-dad, two-way", "rank-dad, all-reduced"),
    *("powersgd", "sparse, threshold", "sparse, random", "signs"),
}
"""One of each kind."""
STEPS = 4


def batch(site: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    return torch.randn(ROWS, 2, 8, generator=generator)


def backward(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# -- in a session -----------------------------------------------------------------------------


class Course(NamedTuple):
    """What one site saw."""

    steps: list[dict[str, Tensor]]
    owed: dict[str, Tensor]
    again: list[dict[str, Tensor]]


def course(method: Any, original: nn.Module, rank: int, group: Any) -> Course:
    """Some steps with the same weights; the last half once more, from what was saved before."""
    model, watched = copy.deepcopy(original), Watched(method)
    units = inspect(copy.deepcopy(original), method, og.RULES).model.units
    session = og.distribute(model, watched, group=group)
    steps = [backward(model, batch(rank, step)) for step in range(STEPS // 2)]
    saved = copy.deepcopy(session.state_dict())
    steps += [backward(model, batch(rank, step)) for step in range(STEPS // 2, STEPS)]
    owed = residuals(watched.made[0], units)
    session.detach()
    other = copy.deepcopy(original)
    session = og.distribute(other, Watched(method), group=group)
    session.load_state_dict(saved)
    again = [backward(other, batch(rank, step)) for step in range(STEPS // 2, STEPS)]
    session.detach()
    return Course(steps, owed, again)


def pooled() -> list[dict[str, Tensor]]:
    """The mean gradients of all steps, in float64."""
    model = network().double()
    sites_T = [
        [backward(model, batch(site, step).double()) for site in range(SITES)]
        for step in range(STEPS)
    ]
    return [{name: sum(g[name] for g in s) / SITES for name in s[0]} for s in sites_T]


@pytest.fixture(scope="module")
def courses() -> Callable[[str], list[Course]]:
    """Of all sites, by the name of the method; each runs once."""
    known: dict[str, list[Course]] = {}

    def of(name: str) -> list[Course]:
        if name not in known:
            method, original = METHODS[name], network()
            known[name] = run_on_lasting_groups(SITES, lambda *own: course(method, original, *own))
        return known[name]

    return of


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_all_sites_get_the_same_to_the_bit(name, courses) -> None:
    first, *others = courses(name)
    assert all(
        gradients.keys() == dict(network().named_parameters()).keys() for gradients in first.steps
    )
    for other in others:
        assert_same(first.steps, other.steps)


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_what_is_saved_and_loaded_goes_on_to_the_bit(name, courses) -> None:
    for own in courses(name):
        assert_same(own.steps[STEPS // 2 :], own.again)


@pytest.mark.parametrize("name", rest_slow(EXACT, QUICK & {*EXACT}))
def test_an_exact_method_brings_the_mean_and_owes_nothing(name, courses) -> None:
    for own in courses(name):
        assert own.owed == {}
        for found, expected in zip(own.steps, pooled(), strict=True):
            assert all(relative_error(found[n], expected[n]) < 5e-6 for n in expected)


@pytest.mark.parametrize("name", rest_slow(REMEMBERS_ALL, QUICK & {*REMEMBERS_ALL}))
def test_what_was_applied_and_what_is_owed_are_all_gradients(name, courses) -> None:
    """The sum over the steps of the mean gradients, of the same weights."""
    sites = courses(name)
    for weight in pooled()[0]:
        expected = sum(gradients[weight] for gradients in pooled())
        found = sum(gradients[weight].double() for gradients in sites[0].steps)
        owed = [own.owed[weight].double().view_as(found) for own in sites if weight in own.owed]
        assert relative_error(found + sum(owed) / SITES, expected) < 5e-6


@pytest.mark.slow
def test_the_weights_are_compressed_and_something_is_owed(courses) -> None:
    """Without which the test above would say nothing."""
    for name in REMEMBERS_ALL:
        owed = courses(name)[0].owed
        assert {"3.weight", "5.table"} <= owed.keys(), name
        assert owed["3.weight"].norm() > 0, name


def assert_same(first: Sequence[dict[str, Tensor]], second: Sequence[dict[str, Tensor]]) -> None:
    for one, other in zip(first, second, strict=True):
        for weight, gradient in one.items():
            assert gradient.equal(other[weight]), weight


# -- without a session ------------------------------------------------------------------------


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_what_is_sent_has_the_lengths_that_were_announced(name) -> None:
    compressor, units = exchange_of(METHODS[name], network())
    for step in range(STEPS):
        for one in asked(compressor, units):
            if one.route == Route.REDUCE:
                (sketch,) = compressed(compressor, one, step)
                assert sketch.shape == compressor.sketches.shape(one.slot)
                continue
            announced = piece(compressor, one)
            payload = compressed(compressor, one, step)
            fields = announced.fields()
            assert len(payload) >= len(fields)
            for agreed, t in zip(fields, payload, strict=False):
                if t is not None:
                    assert_fits(agreed, t)
            assert_arrives(announced, payload)
        compressor.commit(applied=True)


def assert_fits(agreed: Field, t: Tensor | Encoded) -> None:
    """It is written as what was announced, or as fewer rows of that."""
    written = t.written if isinstance(t, Encoded) else encode(agreed.codecs, t)
    for plain, part in zip(agreed.tensors(), written, strict=True):
        assert len(part.shape) == len(plain.shape)
        assert all(n <= most for n, most in zip(part.shape, plain.shape, strict=True))


def assert_arrives(announced: Piece, payload: Payload) -> None:
    """Written and read, as a message is: what is read has the shape of the gradient."""
    layout, slot = Layout(0, {}, [announced]), announced.slot
    message = torch.zeros(layout.nbytes, dtype=torch.uint8)
    (view,) = layout.views(message)
    view.fill(payload)
    assert layout.nbytes == announced.nbytes
    (arrived,) = layout.gradients(message)
    if slot.lookup:
        return
    assert as_tensor(arrived).shape == (slot.groups, slot.outputs, slot.inputs)
    assert as_tensor(arrived).isfinite().all()
    assert as_tensor(arrived).any()


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_a_void_step_leaves_everything_as_it_was(name) -> None:
    compressor, units = exchange_of(METHODS[name], network())
    slots = list(asked(compressor, units))
    for one in slots:
        compressed(compressor, one, seed=0)
    compressor.commit(applied=True)
    before, owed = flat(compressor.state()), flat(residuals(compressor, units))
    phase = compressor.phase
    for one in slots:
        compressed(compressor, one, seed=1)
    compressor.commit(applied=False)
    assert flat(compressor.state()) == before
    assert flat(residuals(compressor, units)) == owed
    assert compressor.phase == phase


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_a_new_exchange_goes_on_from_a_state_to_the_bit(name) -> None:
    compressor, units = exchange_of(METHODS[name], network())
    slots = list(asked(compressor, units))
    for one in slots:
        compressed(compressor, one, seed=0)
    compressor.commit(applied=True)
    other, _ = exchange_of(METHODS[name], network())
    other.load(inheritance(compressor.state(), units))
    assert flat(other.state()) == flat(compressor.state())
    for one in asked(compressor, units):
        found = compressed(other, one, seed=1)
        assert flat(found) == flat(compressed(compressor, one, seed=1))


@pytest.mark.parametrize("name", rest_slow(METHODS, QUICK))
def test_it_answers_for_every_unit_of_every_model(name) -> None:
    for label, make in build().items():
        torch.manual_seed(0)
        try:
            compressor, units = exchange_of(METHODS[name], make().model)
        except ValueError as error:  # refused by name
            raise AssertionError(label) from error
        for unit in units:
            for sites in (1, 2, SITES):
                answers(compressor, unit, sites)
        for sites in (2, SITES):
            assert_lengths(compressor, list(asked(compressor, units, sites)))


def answers(compressor: Compressor, unit: Unit, sites: int) -> None:
    assert compressor.reveals(unit)
    assert isinstance(compressor.amount(unit), str)
    assert compressor.break_even(unit, sites) >= 0
    for rows in (0, 1, 1000):
        rows_SK = [[rows] * len(unit.sources)] * sites
        tapped = bool(unit.sources) and compressor.taps(unit, rows_SK)
        assert isinstance(compressor.route(unit, rows_SK, tapped=tapped), Route)


def assert_lengths(compressor: Compressor, slots: Sequence[Asked]) -> None:
    """They follow from the slot and the rows alone, and are no more than there is."""
    for one in slots:
        if one.route != Route.REDUCE:
            assert 0 < count(compressor, one) <= max(one.slot.numel, ROWS)
            assert compressor.payload_bytes(one.slot, count(compressor, one)) > 0
            assert piece(compressor, one).nbytes > 0
