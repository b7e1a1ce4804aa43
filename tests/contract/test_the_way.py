"""The way of one gradient is the one that docs/design.md tells of, and a short one."""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import outergrad as og
from places import REPOSITORY
from ranks import run_on_lasting_groups

PAGE = REPOSITORY / "docs" / "design.md"
PACKAGE = str(Path(og.__file__).parent)
FIRST = ("capture/tap.py", "backward")
STEPS = 4  # the last of them goes without headers
MOST_CHANGES, MOST_RETURNS = 44, 22


def holds_tensor(value):
    """Whether a tensor stands in it, parameters aside."""
    if isinstance(value, partial):
        value = value.args
    if isinstance(value, tuple | list | dict):
        return any(map(holds_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)


class Way:
    """The calls within the package from a tap's backward until a gradient is there.

    Attributes:
        calls: file and function of each, in order.
        carrying: whether each was given a tensor, or gave one back.
    """

    def __init__(self, p):
        self._p, self._running = p, []
        self.calls, self.carrying = [], []

    def __call__(self, frame, event, returned):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(PACKAGE) or self._p.grad is not None:
            return
        place = Path(file).relative_to(PACKAGE).as_posix(), name
        if event == "call" and (self.calls or place == FIRST):
            self._running.append(len(self.calls))
            self.calls.append(place)
            self.carrying.append(holds_tensor(tuple(frame.f_locals.values())))
        elif event == "return" and self._running:
            self.carrying[self._running.pop()] |= holds_tensor(returned)

    @property
    def files(self):
        """Of the calls that carry the gradient, each as often as the way comes to it."""
        pairs = zip(self.calls, self.carrying, strict=True)
        files = [file for (file, name), carries in pairs if carries and not name.startswith("<")]
        return [files[0], *(file for before, file in pairwise(files) if file != before)]


@pytest.fixture(scope="module")
def way():
    def body(rank, group):
        model = nn.Sequential(nn.Linear(64, 64))
        session = og.distribute(model, og.DAD(), group=group)
        for step in range(STEPS):
            model.zero_grad()
            loss = model(torch.randn(4, 64)).square().mean()
            found = Way(model[0].weight)
            time.sleep(0.3 * (step == STEPS - 1))  # what the others sent of the last step is here
            sys.setprofile(found if step == STEPS - 1 and rank == 0 else None)
            try:
                loss.backward()
            finally:
                sys.setprofile(None)
        assert session.stats().layers["0.weight"].travels == "factors"
        session.detach()
        return found

    return run_on_lasting_groups(2, body)[0]


def test_the_documented_stops_are_called_in_that_order(way):
    text = PAGE.read_text(encoding="utf-8")
    section = text.split("## The way of one gradient\n")[1].split("\n## ")[0]
    stops = re.findall(r"`([\w/]+\.py):(?:\w+\.)?(\w+)`", section)
    assert 10 <= len(stops) <= 14
    calls = iter(way.calls)
    for stop in stops:
        assert stop in calls, f"{stop} is not called behind the stop before it"


def test_the_way_is_short(way):
    changes = len(way.files) - 1
    returns = len(way.files) - len(set(way.files))
    told = "\n".join(way.files)
    assert changes <= MOST_CHANGES, f"{changes} changes of file:\n{told}"
    assert returns <= MOST_RETURNS, f"{returns} returns into files that it had left:\n{told}"
