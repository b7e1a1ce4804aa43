"""Masks cancel, and hide from a hub that keeps everything what it adds up."""

from __future__ import annotations

import os
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from masked import is_random
from outergrad.star import run
from outergrad.star.frames import ALL, Kind
from outergrad.star.masks import NONCE_BYTES, Masks
from outergrad.star.run import Run
from stars import comms_on_star

NONCE = bytes(range(NONCE_BYTES))
LENGTH = 40_000
"""Longer than what is masked at a time."""


def masks_of(sites):
    keys = {pair: os.urandom(32) for pair in combinations(range(sites), 2)}
    common = os.urandom(32)
    others = ([other for other in range(sites) if other != rank] for rank in range(sites))
    return [
        Masks({other: keys[min(rank, other), max(rank, other)] for other in of_rank}, common, rank)
        for rank, of_rank in enumerate(others)
    ]


def hidden(masks, numbers, nonce=NONCE):
    own = numbers.copy()
    masks.hide(own, nonce)
    return own


@pytest.mark.parametrize("sites", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_masks_of_all_sites_cancel(sites, dtype):
    limits = np.iinfo(dtype)
    draw = np.random.default_rng(sites)
    parts = [
        draw.integers(limits.min, limits.max, LENGTH, dtype, endpoint=True) for _ in range(sites)
    ]
    every = masks_of(sites)
    total = sum(hidden(masks, part) for masks, part in zip(every, parts, strict=True))
    assert np.count_nonzero(total != sum(parts)) > 0.99 * LENGTH
    for masks in every:
        assert np.array_equal(masks.shown(total, NONCE), sum(parts))


def test_those_of_fewer_sites_do_not():
    every = masks_of(3)
    found = [hidden(masks, np.zeros(LENGTH, np.int32)) for masks in every]
    for some in combinations(found, 2):
        assert np.count_nonzero(every[2].shown(sum(some), NONCE)) > 0.99 * LENGTH


def test_masks_of_another_nonce_are_others():
    masks, zeros = masks_of(2)[0], np.zeros(LENGTH, np.int32)
    first, again, other = (hidden(masks, zeros, n) for n in (NONCE, NONCE, NONCE[:-1] + b"\xff"))
    assert np.array_equal(first, again)
    assert np.count_nonzero(first != other) > 0.99 * LENGTH


# -- a hub that keeps everything ------------------------------------------------------------------

SITES, SIZE, TIMES = 3, 20_000, 4
OWN = {
    "constants": lambda rank: torch.full((SIZE,), 3.0),
    "zeros": lambda rank: torch.zeros(SIZE),
    "sites of their own": lambda rank: torch.full((SIZE,), 10.0**rank),
    "bits": lambda rank: (torch.arange(SIZE) % 2).float(),
    "whole numbers": lambda rank: torch.arange(SIZE),
}


def kept_by_the_hub(monkeypatch, own, settings):
    """Bytes of messages by lane, number and sender, as they passed, and of sums that it made."""
    kept, take, relay = {}, Run.take, run.relay

    def keep(of, member, frame):
        if frame.kind == Kind.SUM:
            place = frame.lane, frame.number, frame.sender
            kept[place] = kept.get(place, b"") + bytes(frame.payload)
        take(of, member, frame)

    def keep_sum(frame, *args):
        if frame.kind == Kind.SUM:
            place = frame.lane, frame.number, ALL
            kept[place] = kept.get(place, b"") + frame.payload
        relay(frame, *args)

    monkeypatch.setattr(Run, "take", keep)
    monkeypatch.setattr(run, "relay", keep_sum)

    def body(comm):
        for _ in range(TIMES):
            total = comm.all_reduce(own(comm.rank)).wait()
            assert torch.equal(total, sum(own(rank) for rank in range(SITES)))

    comms_on_star(SITES, body, settings=settings)
    return kept


def numbers_in(kept):
    """Those of the numbers themselves, and not of a few sizes before."""
    whole = [one for one in kept.values() if len(one) >= 4 * SIZE]
    assert len(whole) == (SITES + 1) * TIMES
    return [np.frombuffer(one, np.uint8)[: 4 * SIZE] for one in whole]


def are_unlike(messages):
    """True if no two of them agree, or differ by what is the same everywhere."""
    return all(
        is_random([one ^ other, (one.view("<i4") - other.view("<i4")).view(np.uint8)])
        for one, other in combinations(messages, 2)
    )


@pytest.mark.parametrize("name", OWN)
def test_a_hub_that_keeps_all_learns_no_number(monkeypatch, name):
    messages = numbers_in(kept_by_the_hub(monkeypatch, OWN[name], {"blind": True}))
    assert is_random(messages)
    assert are_unlike(messages)


def test_otherwise_it_would(monkeypatch):
    kept = kept_by_the_hub(monkeypatch, OWN["constants"], {})
    assert not any(is_random([one]) for one in numbers_in(kept))


def test_what_passes_does_not_go_with_what_sites_have(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    own = torch.randn(SITES, SIZE, generator=draw).sign()
    kept = kept_by_the_hub(monkeypatch, lambda rank: own[rank].clone(), {"blind": True})
    for message in numbers_in(kept):
        passed = message.view("<i4").astype(np.float64)
        for site in range(SITES):
            assert abs(np.corrcoef(passed, own[site])[0, 1]) < 6 / SIZE**0.5


def test_the_sizes_by_which_sites_agree_are_hidden_too(monkeypatch):
    kept = kept_by_the_hub(monkeypatch, OWN["zeros"], {"blind": True})
    sizes = [np.frombuffer(one, np.uint8) for one in kept.values() if len(one) < SIZE]
    assert sizes
    assert all(np.count_nonzero(one) > 0.9 * len(one) for one in sizes)
    assert all(np.count_nonzero(one != other) > 0.9 * len(one) for one, other in pairwise(sizes))
