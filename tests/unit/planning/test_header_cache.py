"""When steps go without headers, where methods take turns."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import outergrad as og
from cases import mlp
from outergrad.messages.header import Header, SlotUse
from outergrad.methods.auto.chooser import AutoChooser
from outergrad.planning.header_cache import HeaderCache
from ranks import run_on_lasting_groups

USE = SlotUse(8, tapped=True, dtype=torch.float32)
HEADERS = [Header(1, 0, rank, (True, True), (USE,)) for rank in range(2)]
OTHERS = [
    {"alone": False},
    {"used": (True, False)},
    {"weight": 3},
    {"buffers": (True,)},
]


def cache_of(headers: list[Header]) -> HeaderCache:
    """That has seen these in two steps."""
    cache = HeaderCache(lambda hs: [h.facts for h in hs], lambda hs: [h.uses for h in hs])
    for _ in range(2):
        cache.exchanged(headers)
    return cache


@pytest.mark.parametrize("other", OTHERS)
def test_what_another_combination_foresaw_of_another_loop_is_forgotten(other):
    cache = cache_of(HEADERS)
    cache.follow(cache_of([replace(header, **other) for header in HEADERS]))
    assert cache.foreseen(5) is None


def test_what_it_foresaw_of_the_same_loop_holds_whatever_the_rows():
    """They are its own methods' business."""
    cache, more = cache_of(HEADERS), replace(USE, rows=9)
    cache.follow(cache_of([replace(header, uses=(more,)) for header in HEADERS]))
    assert cache.foreseen(5) == [replace(header, step=5) for header in HEADERS]


def test_it_goes_on_behind_one_that_has_seen_nothing():
    cache = cache_of(HEADERS)
    cache.follow(cache_of([]))
    assert cache.foreseen(5) is not None


def test_a_session_that_came_meanwhile_surprises_once_not_once_per_way(monkeypatch):
    """Ways that take turns were each foreseen alone on the group."""
    surprises, was_wrong = [], HeaderCache.was_wrong
    monkeypatch.setattr(
        HeaderCache, "was_wrong", lambda self: (surprises.append(self), was_wrong(self))
    )
    arms = lambda self, step: (step // 4 % 2,) * len(self._groups)  # noqa: E731
    monkeypatch.setattr(AutoChooser, "_arm", arms)

    def body(rank, group):
        model, other = mlp(12, 10, 4), mlp(6, 4)
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(rank))
        session, second = og.distribute(model, og.Auto(), group=group), None
        for k in range(32):
            if k == 18:
                second = og.distribute(copy.deepcopy(other), og.DAD(), group=group)
            model.zero_grad()
            (model(x) ** 2).mean().backward()
        foreseen = len(session._exchange.planner._header_caches)
        session.detach()
        assert second is not None
        second.detach()
        return foreseen

    assert run_on_lasting_groups(2, body) == [2, 2]
    assert len(surprises) == 2  # the first step beside the other one, at both sites
