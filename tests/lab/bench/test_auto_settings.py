"""og.Auto() in made-up settings, drawn at random: `benchmarks/auto.py`, of which CI runs a few."""

from __future__ import annotations

import random
import sys
from statistics import median

import pytest

from covering import LONG
from outergrad.methods.auto.trials import Stretch
from places import REPOSITORY

sys.path.append(str(REPOSITORY / "benchmarks"))
import auto

SETTINGS, STEPS = (600, 6000) if LONG else (40, 6000)


@pytest.fixture(scope="module")
def found():
    return auto.results(SETTINGS, STEPS, seed=1)


@pytest.mark.slow
def test_what_is_kept_is_near_the_best_in_nearly_all_settings(found):
    wrong = [(setting, result) for setting, result in found if result.over_best > auto.NEAR]
    assert len(wrong) <= 0.05 * len(found), wrong


def test_looking_costs_a_hundredth_of_the_time_once_it_is_settled(found):
    """The purse is earned by what steps seemed to take: with noise it is not exact."""
    looking = [result.looking for _, result in found]
    assert median(looking) <= 0.01
    assert max(looking) <= 0.015


def test_settings_are_of_every_kind(found):
    settings = [setting for setting, _ in found]
    assert {setting.noise for setting in settings} == set(auto.NOISES)
    assert {setting.sites for setting in settings} == {2, 4}
    assert {setting.slower for setting in settings} == {0.2, 1.0, 5.0}
    assert {len(setting.methods) for setting in settings} == {len(auto.EXACT), len(auto.LOSSY)}


def test_a_chooser_that_never_looks_is_found_out(monkeypatch):
    """The settings are such that the forecast by itself is often wrong."""

    def never(self, step):
        return Stretch.quiet(step + 2, self._kept, settled=True)

    monkeypatch.setattr(auto.AutoChooser, "_next", never)
    blind = auto.results(SETTINGS, 400, seed=1)
    assert auto.share_right(blind) < 0.9


def test_a_setting_repeats():
    once, again = (
        auto.run(auto.Setting.drawn(random.Random(3)), 500, random.Random(4)) for _ in range(2)
    )
    assert once == again
