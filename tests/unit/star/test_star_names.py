"""Around a hub, whatever is raised or warned of in training calls sites by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import outergrad as og
from stars import NAMES, on_star

NUMBER = re.compile(r"\b[Ss]ites? \d")
SITES = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def steps(model: nn.Module, count: int = 2) -> None:
    for _ in range(count):
        model.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()


def another_method(rank, one):
    og.distribute(net(), og.DAD() if rank else og.Dense(), transport=one, timeout=10)


def no_model(rank, one):
    og.distribute(net() if rank else nn.Linear(4, 2), og.DAD(), transport=one, timeout=10)


def a_backward_that_raises(rank, one):
    model = net()
    og.distribute(model, og.DAD(), transport=one, timeout=10)
    steps(model)
    if rank == 1:
        handle = model[1].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(model, 1)
        handle.remove()
    steps(model)


def gradients_that_are_not_finite(rank, one):
    model = net()
    og.distribute(model, og.DAD(), transport=one, timeout=10, max_bad_steps=0)
    (model(torch.ones(3, 4)).sum() * (torch.nan if rank == 1 else 1.0)).backward()


def another_weight(rank, one):
    model = net()
    session = og.distribute(model, og.DAD(), transport=one, timeout=10, verify_every=1)
    with torch.no_grad():
        model[0].weight += rank == 1
    steps(model)
    session.detach()


def one_alone_joins(rank, one):
    model = net()
    session = og.distribute(model, og.DAD(), transport=one, timeout=10)
    if rank == 1:
        with session.join():
            steps(model)
    else:
        steps(model)


def one_leaves(rank, one):
    model = net()
    session = og.distribute(model, og.DAD(), transport=one, timeout=10)
    steps(model)
    if rank == 1:
        session.detach()
        one.close()
        return
    steps(model)


def one_is_late(rank, one):
    model = net()
    og.distribute(model, og.DAD(), transport=one, timeout=1)
    steps(model)
    if rank != 1:
        steps(model)


def another_parameter(rank, one):
    model = net()
    og.distribute(model, og.DAD(), transport=one, timeout=10)
    steps(model)
    if rank == 1:
        model[0].weight = nn.Parameter(torch.zeros(6, 4))
    steps(model)


def another_state(rank, one):
    model = net()
    session = og.distribute(model, og.RankDAD(rank=1), transport=one, timeout=10)
    steps(model)
    state = session.state_dict()
    session.load_state_dict(state | {"rank": 1})


def another_delta(rank, one):
    model = net()
    method = og.PerLayer({"0.*": og.Local(), "*": og.DAD()}, joint=True)
    og.distribute(model, method, transport=one, timeout=10)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(3 + (rank == 1), 4)).square().sum().backward()


def chain(error: BaseException | None) -> Iterator[str]:
    """What a traceback shows of an error and of those that led to it."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


CASES: list[Callable] = [
    another_method,
    no_model,
    a_backward_that_raises,
    gradients_that_are_not_finite,
    another_weight,
    one_alone_joins,
    one_leaves,
    one_is_late,
    another_parameter,
    another_state,
    another_delta,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_errors_name_the_sites(case):
    def body(rank, one):
        try:
            case(rank, one)
        except (RuntimeError, ValueError) as error:
            return [*chain(error)]
        return []

    told = on_star(SITES, body)
    assert any(name in text for texts in told for text in texts for name in NAMES[:SITES]), told
    numbers = [text for texts in told for text in texts if NUMBER.search(text)]
    assert not numbers, "\n".join(numbers)
