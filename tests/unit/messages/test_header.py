"""A header of another step is the same but for the step, and leaves the first one as it was."""

from __future__ import annotations

from dataclasses import replace

import torch

from outergrad.messages.header import Header, Join, SlotUse


def test_another_step_changes_nothing_else():
    uses = (SlotUse(3, True, torch.float32),)
    about = {"alone": False, "joint": (1, 2), "weight": 5, "join": Join.INSIDE, "buffers": (True,)}
    header = Header(7, 1, 2, (True, False), uses, **about)
    assert header.of_step(9) == replace(header, step=9)
    assert header.step == 1
