"""Settings of exchanges on drift."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import outergrad as og
from jumping import Jumps


class Nameless:
    def start(self):
        return None


@dataclass
class Unfrozen:
    def start(self):
        return None


REFUSED = {
    "a class": (TypeError, lambda: og.OnDrift(Jumps), "detector=<class .*; use og.drift."),
    "no detector": (TypeError, lambda: og.OnDrift(0.01), "detector=0.01; use og.drift."),
    "no repr": (TypeError, lambda: og.OnDrift(Nameless()), "Nameless: the sites compare its repr"),
    "no hash": (
        TypeError,
        lambda: og.OnDrift(Unfrozen()),
        "has no hash, .*make it a frozen dataclass",
    ),
    "of": (ValueError, lambda: og.OnDrift(of="loss"), "of='loss'; use 'losses' or 'observed'"),
    "check": (ValueError, lambda: og.OnDrift(check=0), "check=0; use a whole number, 1 or more"),
    "most": (ValueError, lambda: og.OnDrift(check=4, most=6), "most=6; .* that check=4 divides"),
    "none": (ValueError, lambda: og.OnDrift(most=0), "most=0; use a whole number, 1 or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_with_a_remedy(name):
    kind, make, message = REFUSED[name]
    with pytest.raises(kind, match=f"^OnDrift: .*{message}"):
        make()


WITH_OTHERS = {
    "stream": (lambda k: og.LocalSteps(k, stream=2), "does not go with stream=2"),
    "overlap": (lambda k: og.LocalSteps(k, overlap=1), "does not go with overlap=1"),
    "quorum": (lambda k: og.LocalSteps(k, quorum=1, grace=1), "does not go with quorum=1"),
    "blocks": (lambda k: og.EDAD(blocks=["0"], every=k), "use 1 with blocks="),
    "inside": (lambda k: og.LocalSteps(2, method=og.Dense(every=k)), "leave every=1"),
    "gossip": (lambda k: og.Gossip("ring", every=k), "needs a vote of all sites.*LocalSteps"),
    "auto": (lambda k: og.Auto(every=k), "use a whole number, or name a method"),
}


@pytest.mark.parametrize("name", WITH_OTHERS)
def test_what_it_does_not_go_with_is_refused(name):
    make, message = WITH_OTHERS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make(og.OnDrift(Jumps()))


@pytest.mark.parametrize("make", [og.LocalSteps, lambda k: og.Dense(every=k)])
@pytest.mark.parametrize("k", [0, "drift", True])
def test_what_is_neither_a_number_nor_a_drift_is_refused(make, k):
    with pytest.raises(ValueError, match=r"use .*(whole number|1 or more)"):
        make(k)


def test_equal_settings_are_equal_and_read_alike():
    one, other = (og.LocalSteps(og.OnDrift(Jumps(), most=8)) for _ in range(2))
    assert one == other
    assert repr(one) == repr(other)
    assert "most=8" in repr(one)
    assert og.OnDrift(Jumps(), most=8).often == "on drift, at least every 8 steps"
