"""Figures of trainings without a centre on docs/gossip.md are those of the experiment's results."""

from __future__ import annotations

from statistics import fmean

import pytest

from outergrad_lab.experiments.gossip import exchanges
from places import REPOSITORY
from published import (
    assert_each_task_has_a_result,
    assert_tables_are_those_of_the_results,
    body,
    results,
)

PAGE = (REPOSITORY / "docs" / "gossip.md").read_text()


def mean(value: str, told: str, **wanted: str) -> float:
    """Over the seeds, of which there are three."""
    found = [
        one["rows"][0][value]
        for one in results("gossip")
        if one["settings"].items() >= wanted.items() and exchanges(one["settings"]) == told
    ]
    assert len(found) == 3
    return fmean(found)


def test_tables_are_those_of_the_results(tmp_path):
    assert_each_task_has_a_result("gossip")
    assert_tables_are_those_of_the_results("gossip", tmp_path)


@pytest.mark.parametrize("name", ["accuracy", "loss"])
def test_tables_are_on_the_page(name):
    assert body("gossip", name) in PAGE


def sorted_rows(told: str, value: str = "accuracy") -> float:
    return 100 * mean(value, told, split="sorted")


def gpt(value: str, told: str) -> float:
    return mean(value, told, data="tinyshakespeare")


SENTENCES = {
    "is at {:.1f} % instead of {:.1f} %, and its worst site at {:.1f} % instead of {:.1f} %": (
        lambda: [
            sorted_rows(told, value)
            for value in ("accuracy", "worst_accuracy")
            for told in ("ring, momentum=0.9", "ring")
        ]
    ),
    "to {:.1f} %; beside the optimizer's own momentum they bring nothing, {:.1f} %": (
        lambda: [sorted_rows("ring, rounds=2, momentum=0.9"), sorted_rows("ring, rounds=2")]
    ),
    "Four rounds bring it to {:.1f} %, for {:.1f} times the bytes of an all-reduce": (
        lambda: [
            sorted_rows("ring, rounds=4, momentum=0.9"),
            sorted_rows("ring, rounds=4, momentum=0.9", "sent_bytes")
            / sorted_rows("all-reduce", "sent_bytes"),
        ]
    ),
    "then {:.1f} points to it are left": (
        lambda: [sorted_rows("all-reduce") - sorted_rows("ring, rounds=4, momentum=0.9")]
    ),
    "At rank 1 a momentum of 0.5 brings the mean to {:.1f} % instead of {:.1f} %": (
        lambda: [
            sorted_rows("ring, power, rank 1, momentum=0.5"),
            sorted_rows("ring, power, rank 1"),
        ]
    ),
    "The ring ends {:.3f} above `og.LocalSteps(15)`, for {:.2f} times its bytes": (
        lambda: [
            gpt("test_loss", "ring, every=15") - gpt("test_loss", "local steps, every=15"),
            gpt("sent_bytes", "ring, every=15") / gpt("sent_bytes", "local steps, every=15"),
        ]
    ),
    "and momentum of 0.3 it ends {:.3f} above local steps with the same outer optimizer": (
        lambda: [
            gpt("test_loss", "ring, every=15, lr=0.7, momentum=0.3")
            - gpt("test_loss", "local steps, every=15, lr=0.7, momentum=0.3")
        ]
    ),
    "behind five steps cost {:.3f} in loss, behind all fifteen {:.3f}": (
        lambda: [
            gpt("test_loss", f"ring, every=15, overlap={steps}")
            - gpt("test_loss", "ring, every=15")
            for steps in (5, 15)
        ]
    ),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_figures_in_sentences_are_measured(sentence):
    assert sentence.format(*SENTENCES[sentence]()) in PAGE
