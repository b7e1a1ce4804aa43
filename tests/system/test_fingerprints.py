"""benchmarks/fingerprints.py: the same code has the same line, and other bits have another."""

from __future__ import annotations

import pytest

from covering import covering
from places import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture
def fingerprints(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import fingerprints

    return fingerprints


def line(of, method, situation, sites=2, steps=9):
    with of.recorded():
        return of._line(of.Run("deep-mlp", method, situation, sites, steps), None)


@pytest.mark.parametrize(
    ("method", "sites"), covering(["dense", "rank-dad", "local-steps"], [2, 3], quick=0, every=2)
)
def test_a_usual_loop_repeats_to_the_bit(fingerprints, method, sites):
    first = line(fingerprints, method, "", sites)
    assert "Error" not in first
    assert first == line(fingerprints, method, "", sites)


@pytest.mark.parametrize("situation", ["join", "clip", "verify", "samples", "star", "mesh"])
def test_every_situation_repeats_to_the_bit(fingerprints, situation):
    assert situation in fingerprints.SITUATIONS
    first = line(fingerprints, "rank-dad", situation)
    assert "Error" not in first
    assert first == line(fingerprints, "rank-dad", situation)


def test_another_method_has_other_gradients_and_messages(fingerprints):
    one, other = (line(fingerprints, method, "").split(": ")[1] for method in ("dense", "rank-dad"))
    assert not {*one.split()} & {*other.split()}
