"""A relay that cannot run, or not to the end, says why in one line."""

from __future__ import annotations

import time

import psutil
import pytest

from outergrad.launch import namespaces as module
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.namespaces import can_relay, namespaces, relay

LATE = ShapedLink(rate_bit_per_s=None, rtt_s=0.01)
MISSING = what_is_missing(LATE, 2) or (None if can_relay() else "no `cc` or no /dev/net/tun")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    source = tmp_path / "relay.c"
    source.write_text('#error "no such machine"\n')
    monkeypatch.setattr(module, "SOURCE", source)
    said = r"^--latency: cannot compile the relay \(.*no such machine"
    with pytest.raises(RecipeError, match=said), relay("any", ["tap0"], 0.01):
        pass


def test_a_relay_that_does_not_start_is_quoted():
    said = r"^--latency: the relay does not start \(.*no-such-place"
    with pytest.raises(RecipeError, match=said), relay("no-such-place", ["tap0"], 0.01):
        pass


def kill_the_relay():
    (process,) = [p for p in psutil.Process().children() if p.name() == "relay"]
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_a_relay_that_ends_too_early_is_told():
    said = r"^--latency: the relay ended too early \(code -9\)"
    with (
        pytest.raises(RecipeError, match=said),
        namespaces(2, None, 0.0) as names,
        relay(names[0], ["tap0"], 0.01),
    ):
        kill_the_relay()
