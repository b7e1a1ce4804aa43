"""Sums of floats under masks: as near as their unit, the same on all sites, and never too large."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from masked import drawn, exactly, most_error
from outergrad.core.errors import ExchangeError, Failure
from outergrad.star import run
from outergrad.star.fixed_point import CARRIERS, HEADROOM, in_units, largest_of
from outergrad.star.masked_sums import AGREED, FIRST, SIZES
from outergrad.star.run import Run
from outergrad.star.units import sizes_of, unit_for
from stars import CPU, comms_on_star, on_star

BLIND = {"blind": True}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def summed(*parts, settings=BLIND, turns=()):
    """Sums of `parts`, each a list of the sites' tensors: on every site the same bits."""

    def body(comm):
        found = []
        for k, part in enumerate(parts):
            if turns:
                comm.take_turn(turns[k])
            own = part[comm.rank].clone()
            assert comm.all_reduce(own).wait() is own
            found.append(own)
        return found

    first, *others = comms_on_star(len(parts[0]), body, settings=settings)
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one.nan_to_num(7), same.nan_to_num(7))
            assert torch.equal(one.isnan(), same.isnan())
    return first


def assert_near(parts, total, fell=1.0):
    error = (total.double() - exactly(parts)).abs()
    assert (error <= most_error(parts, total, fell)).all()


@pytest.mark.parametrize("sites", [2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_is_as_near_as_its_unit(sites, dtype):
    parts = drawn(sites, 37, 11, dtype=dtype)
    first, again = summed(parts, parts)
    assert_near(parts, first)
    assert torch.equal(first, again)


@pytest.mark.parametrize("scale", [1e-43, 1e-30, 1e-3, 1e20, 1e37])
def test_floats_of_any_size_can_be_summed(scale):
    parts = drawn(3, 100, scale=scale)
    assert_near(parts, *summed(parts))


@pytest.mark.parametrize("scale", [1e-250, 1e200, 1e307])
def test_so_can_those_of_64_bits(scale):
    parts = drawn(3, 100, dtype=torch.float64, scale=scale)
    assert_near(parts, *summed(parts))


def test_units_are_fine_beside_those_of_float32():
    """At four sites: half of its precision of the largest number, however long the sum."""
    parts = drawn(4, 10_000)
    error = summed(parts)[0].double() - exactly(parts)
    assert float(error.abs().max()) < 2.0**-24 * 4 * largest_of(parts[0].numpy())


@pytest.mark.parametrize("turns", [(), (1, 2, 3, 4, 5, 6)])
def test_numbers_may_grow_and_shrink(turns):
    kinds = [drawn(3, 50, scale=scale, seed=k) for k, scale in enumerate((1, 3, 1e6, 1, 1e-9, 0))]
    for parts, total in zip(kinds, summed(*kinds, turns=turns), strict=True):
        assert_near(parts, total, fell=2.0**HEADROOM)


def test_one_site_alone_may_have_larger_numbers():
    usual = drawn(3, 50)
    large = [usual[0], 1e5 * usual[1], usual[2]]
    for parts, total in zip((usual, large, usual), summed(usual, large, usual), strict=True):
        assert_near(parts, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_goes_as_around_a_hub_that_reads(dtype):
    inf, nan = math.inf, math.nan
    odd = [[inf, inf, nan, -inf, 1], [1, -inf, 2, 3, 1], [4, 5, 6, -inf, 1]]
    odd = [torch.tensor(one, dtype=dtype) for one in odd]
    usual = [torch.ones(5, dtype=dtype)] * 3
    parts = usual, odd, usual
    for mine, theirs in zip(summed(*parts), summed(*parts, settings={}), strict=True):
        assert torch.equal(mine.nan_to_num(7.5), theirs.nan_to_num(7.5))
        assert torch.equal(mine.isnan(), theirs.isnan())


def test_too_large_a_sum_is_infinite():
    for dtype in (torch.float16, torch.float32, torch.float64):
        most = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
        assert torch.isposinf(summed([most] * 3)[0]).all()


@pytest.mark.parametrize("large", [1.0, 1e4, 1e9])
def test_a_count_of_sites_is_never_lost(large):
    """Beside numbers of any size: whether it is none, some or more than a half."""
    own = [torch.tensor([large, -large, 0.0, count]) for count in (0.0, 2.0**-12, 0.0)]
    total = summed(own)[0]
    assert total[2] == 0
    assert total[3] > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_whole_numbers_are_exact_modulo_their_width(dtype):
    limits = torch.iinfo(dtype)
    own = torch.tensor([limits.max, limits.min, 1, 0], dtype=dtype)
    assert torch.equal(summed([own] * 3)[0], own + own + own)


# -- bytes and rounds -----------------------------------------------------------------------------


def lanes(monkeypatch, *kinds, turns=()):
    """The lanes of the messages of one site, and the bytes of all its frames' payloads."""
    seen, take = [], Run.take

    def note(run, member, frame):
        if frame.sender == 0 and not frame.offset:
            seen.append((frame.lane, frame.total))
        take(run, member, frame)

    monkeypatch.setattr(Run, "take", note)
    summed(*kinds, turns=turns)
    places = FIRST, SIZES, AGREED
    sums = [(lane, total) for lane, total in seen if total and lane in places]
    return [lane for lane, _ in sums], sum(total for _, total in sums)


def test_a_sum_takes_the_bytes_of_one_that_the_hub_reads(monkeypatch):
    parts = drawn(3, 10_000)
    _, nbytes = lanes(monkeypatch, parts, parts, parts)
    assert nbytes < 1.01 * 3 * parts[0].nbytes


def test_sites_agree_on_a_unit_once_for_sums_of_a_kind(monkeypatch):
    parts = drawn(2, 100)
    found, _ = lanes(monkeypatch, parts, parts, parts)
    assert found == [SIZES, AGREED, FIRST, FIRST]


def test_they_agree_again_where_numbers_grew_or_shrank(monkeypatch):
    kinds = [drawn(2, 100, scale=scale) for scale in (1, 100, 1)]
    found, _ = lanes(monkeypatch, *kinds)
    again = [FIRST, SIZES, AGREED]
    assert found == [SIZES, AGREED, *again, *again]


def test_a_sum_is_of_the_kind_of_that_at_its_place_in_the_step(monkeypatch):
    """Two of one length and other sizes, in each of two steps."""
    small, large = drawn(2, 100), drawn(2, 100, scale=1e4)

    def body(comm):
        for step in (1, 2, 3):
            comm.take_turn(step)
            works = [comm.all_reduce(part[comm.rank].clone()) for part in (small, large)]
            for work in works:
                work.advance()
            for part, work in zip((small, large), works, strict=True):
                assert_near(part, work.wait())
        return comm.sent_bytes

    sent, _ = comms_on_star(2, body, settings=BLIND)
    assert sent == 6 * small[0].nbytes


def test_16_bits_travel_as_32():
    def body(comm):
        comm.all_reduce(torch.ones(100, dtype=torch.bfloat16)).wait()
        return comm.sent_bytes

    assert comms_on_star(2, body, settings=BLIND) == [400, 400]


# -- what goes wrong ------------------------------------------------------------------------------


def test_sites_that_know_other_units_agree_anew():
    parts = drawn(3, 100)

    def body(comm):
        comm.all_reduce(parts[comm.rank].clone()).wait()
        comm._units.learn((None, torch.float32, 100), -20 - comm.rank, 1.0)
        return comm.all_reduce(parts[comm.rank].clone()).wait()

    for total in comms_on_star(3, body, settings=BLIND):
        assert_near(parts, total)


def test_a_sum_that_something_has_changed_is_an_error_on_all_sites(monkeypatch):
    added = run.added

    def changed(parts, code):
        total = bytearray(added(parts, code))
        total[-1] ^= 1
        return bytes(total)

    monkeypatch.setattr(run, "added", changed)

    def body(comm):
        with pytest.raises(ExchangeError, match=r"does not come out.*ask whoever runs the hub"):
            comm.all_reduce(torch.ones(100)).wait()

    comms_on_star(2, body, settings=BLIND)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_site_that_has_gone_voids_the_sum_and_is_named(is_known):
    def body(rank, one):
        comm = one.open(CPU)
        if is_known:
            comm.all_reduce(torch.ones(100)).wait()
        if rank == 2:
            return one.close()
        with pytest.raises(ExchangeError, match="site-c is gone") as caught:
            comm.all_reduce(torch.ones(100)).wait()
        assert (caught.value.kind, caught.value.sites) == (Failure.CLOSED, (2,))
        return None

    on_star(3, body, BLIND)


# -- numbers and units ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sites", [2, 3, 8, 100, 1000])
def test_the_largest_numbers_that_fit_add_up_without_overflow(dtype, sites):
    carrier = CARRIERS[dtype]
    limit = 1 << carrier.digits(sites)
    assert sites * (limit - 1) <= np.iinfo(carrier.dtype).max
    assert not carrier.fits(float(limit), 0, sites)
    below = np.nextafter(float(limit), 0)
    assert not carrier.fits(below, 0, sites) or round(below) < limit
    assert not any(carrier.fits(odd, 0, sites) for odd in (math.inf, math.nan))


def test_numbers_are_rounded_and_none_but_zero_becomes_zero():
    own = np.array([0.0, -0.0, 1e-9, -1e-9, 0.5, 1.5, 2.4, -7.6], np.float32)
    into = np.empty(len(own), np.int32)
    in_units(own, 0, into)
    assert into.tolist() == [0, 0, 1, -1, 1, 2, 2, -8]


@pytest.mark.parametrize("sites", [2, 255, 256, 1000])
def test_the_unit_follows_from_the_largest_number_of_all_sites(sites):
    carrier = CARRIERS[torch.float32]
    small = sizes_of(np.array([0.7, -0.1], np.float32), carrier, sites)
    large = sizes_of(np.array([-5.0, 0.0], np.float32), carrier, sites)
    total = small * (sites - 1) + large
    assert unit_for(total, carrier, sites) == (carrier.unit(3, sites), True)
    bad = sizes_of(np.array([math.nan, 1.0], np.float32), carrier, sites)
    assert unit_for(total - large + bad, carrier, sites) == (carrier.unit(1, sites), False)
    with pytest.raises(ExchangeError, match="does not come out"):
        unit_for(total + large, carrier, sites)
