"""A header of another step is the same but for the step, and leaves the first one as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outergrad.core.errors import ExchangeError
from outergrad.core.sites import Site
from outergrad.messages.header import KNOWN, Header, Join, SlotUse, sum_of_words


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("join", [Join.INSIDE, Join.OUT, Join.GONE])
@pytest.mark.parametrize("alone", [False, True])
def test_the_state_of_a_site_is_read_as_it_was_written(whole, join, alone):
    own = Header(7, 1, 0, (True,), (), join=Join.INSIDE)
    sent = replace(own, rank=1, whole=whole, join=join, alone=alone)
    assert Header.parse(sent.words(), own, Site(1, "site 1")) == sent


@pytest.mark.parametrize("state", [16, -1])
def test_a_state_that_cannot_be_is_refused(state):
    own = Header(7, 1, 0, (True,), ())
    words = replace(own, rank=1).words()
    words[KNOWN] = state
    words[8] = sum_of_words([*words[KNOWN:8], 0, *words[9:]])
    with pytest.raises(ExchangeError, match="says what cannot be: a state of"):
        Header.parse(words, own, Site(1, "site 1"))


def test_another_step_changes_nothing_else():
    uses = (SlotUse(3, True, torch.float32),)
    about = {"alone": False, "joint": (1, 2), "weight": 5, "join": Join.INSIDE, "buffers": (True,)}
    header = Header(7, 1, 2, (True, False), uses, **about)
    assert header.of_step(9) == replace(header, step=9)
    assert header.step == 1
