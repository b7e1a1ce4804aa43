"""How many calls of Python functions a step makes for each layer: what they cost adds up."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_ranks

pytestmark = pytest.mark.alone  # a busy machine measures a slow link, and sends in more parts
MOST = {"dense": 5, "dad": 115, "rank-dad": 135}
"""Calls for each layer of a weight and a bias, beyond those of the same step without a session."""


@pytest.mark.parametrize(
    ("name", "method"),
    [("dense", og.Dense()), ("dad", og.DAD()), ("rank-dad", og.RankDAD(rank=2, reduce="gather"))],
)
def test_a_layer_costs_few_calls(name, method):
    few, many = added_calls(method, 12), added_calls(method, 20)
    assert (many - few) / 8 <= MOST[name]


def added_calls(method, layers: int) -> int:
    """Calls that a session adds: what other sessions of this process listen to is in both.

    Of several sessions the fewest, as one may begin while something else runs.
    """
    return min(calls(method, layers) - calls(None, layers) for _ in range(3))


def calls(method, layers: int) -> int:
    """Of site 0 in a step that is like those before it: the fewest, as some need new memory.

    Without a method there is no session.
    """

    def body(rank, group):
        torch.manual_seed(0)
        # So small that sites add up all sums themselves, whatever link a busy machine measures.
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)])
        session = og.distribute(model, method, group=group) if method else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(2, 32)

        def step():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for _ in range(4):
            step()
        found = min(counted(step) for _ in range(8))
        if session:
            session.detach()
        return found

    return run_ranks(2, body)[0]


def counted(step) -> int:
    """Calls of Python functions in this thread."""
    found = 0

    def count(_frame, event, _arg):
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found
