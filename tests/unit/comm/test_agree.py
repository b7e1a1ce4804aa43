"""What sites compare before they share anything."""

from __future__ import annotations

import pytest
import torch

from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from ranks import run_ranks

CPU = torch.device("cpu")


def refused(lines, errors):
    def body(rank, group):
        try:
            agree(TorchDistributed().open(CPU, group=group), lines[rank], errors[rank])
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was refused")

    return run_ranks(2, body)


def test_an_error_is_known_by_its_announcement_not_by_its_words():
    lines = ["error: a line of a description like any other"]
    told = refused([lines, ["something else"]], [None, None])
    assert "do not agree" in told[0]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("words", "told"), [("", "ValueError"), ("two\nlines", "two"), ("plain", "plain")]
)
def test_the_others_are_told_the_error_of_a_site(words, told):
    first, second = refused([["a"], ["a"]], [None, ValueError(words)])
    assert second == words
    assert first == f"site 1 could not take part: {told}"
