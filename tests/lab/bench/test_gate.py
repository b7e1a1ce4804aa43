"""benchmarks/gate.py: what counts as slower."""

from __future__ import annotations

import sys
from random import Random
from types import SimpleNamespace

import pytest

from places import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import gate
from gate import Ratio, compare, load, ratios, save


def rounds(factor: float, count: int = 12, seed: int = 0) -> list[float]:
    """Ratios that scatter by a tenth."""
    dice = Random(seed)
    return [factor * dice.gauss(1.0, 0.1) for _ in range(count)]


def test_bounds_of_twelve_rounds_are_the_third_and_the_tenth():
    assert Ratio.of(range(12)) == Ratio(5.5, 2, 9)


def test_bounds_hold_the_true_ratio_nineteen_times_in_twenty():
    found = [Ratio.of(rounds(1.0, seed=seed)) for seed in range(1000)]
    assert sum(one.lower <= 1.0 <= one.upper for one in found) >= 950


def test_noise_is_not_slower_and_a_third_is():
    recorded = [Ratio.of(rounds(1.0, seed=seed)) for seed in range(1000)]
    again = [Ratio.of(rounds(1.0, seed=1000 + seed)) for seed in range(1000)]
    slow = [Ratio.of(rounds(1.33, seed=5000 + seed)) for seed in range(1000)]
    assert sum(map(Ratio.is_slower_than, again, recorded)) <= 20
    assert sum(map(Ratio.is_slower_than, slow, recorded)) >= 950


def test_ratios_are_of_the_same_round():
    ddp = SimpleNamespace(method="ddp", rounds_s=[[1.0, 9.0, 1.0], [2.0] * 3, [4.0] * 3])
    own = SimpleNamespace(method="dad", rounds_s=[[2.0] * 3, [4.0] * 3, [8.0] * 3])
    assert ratios([ddp, own]) == {"dad": Ratio(2.0, 2.0, 2.0)}


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (2.0, 1)])
def test_the_gate_ends_with_1_where_a_step_is_slower(monkeypatch, tmp_path, capsys, factor, code):
    file = tmp_path / "gate.json"
    monkeypatch.setattr(gate, "measured", lambda *_: {"dad": Ratio.of(rounds(1.0))})
    options = ["--workloads", "mlp", "--file", str(file)]
    assert gate.main([*options, "--record"]) == 0
    monkeypatch.setattr(gate, "measured", lambda *_: {"dad": Ratio.of(rounds(factor))})
    assert gate.main(options) == code
    assert ("slower than recorded: mlp by dad" in capsys.readouterr().out) == bool(code)


def test_what_is_recorded_is_read_again(tmp_path):
    found = {"mlp": {"dad": Ratio(1.1, 1.0, 1.2)}}
    save(tmp_path / "gate.json", found)
    assert load(tmp_path / "gate.json") == found
    assert load(tmp_path / "none.json") == {}
    assert compare(found, {}) == []
