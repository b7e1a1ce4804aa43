"""Weights that are loaded without what a method had not sent of their gradients."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outergrad as og
from cases import mlp
from ranks import run_ranks

LOSSY = {
    "rank-dad": og.RankDAD(rank=1),
    "sums": og.RankDAD(rank=1, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=1),
    "sparse": og.Sparse(density=0.1),
}
OWES_NOTHING = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "no feedback": og.RankDAD(rank=1, error_feedback=None),
}


class Training:
    """A model in a session, and the optimizer; begins from the same weights each time."""

    def __init__(self, group: Any, method: Any, *, wrapped: bool = False) -> None:
        torch.manual_seed(0)
        plain = mlp(20, 24, 20)
        if wrapped:
            self.model = og.DistributedDataParallel(plain, process_group=group, method=method)
            self.session = self.model.session
        else:
            self.model, self.session = plain, og.distribute(plain, method, group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def steps(self, count: int) -> None:
        for step in range(count):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()


def written(state: Any) -> Any:
    """The state, as a script saves and loads it."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def told_by(body: Callable[[Any], None]) -> list[str]:
    """The warnings of two sites."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(2, lambda rank, group: body(group))
    return sorted(str(warning.message) for warning in told)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("method", LOSSY)
def test_weights_alone_are_told_of_once_in_a_new_session(method, wrapped):
    def body(group):
        first = Training(group, LOSSY[method], wrapped=wrapped)
        first.steps(3)
        saved = written(first.model.state_dict())
        first.session.detach()
        second = Training(group, LOSSY[method], wrapped=wrapped)
        second.model.load_state_dict(saved)
        second.steps(2)
        second.session.detach()

    found = told_by(body)
    assert len(found) == 2
    for site, told in enumerate(found):
        assert f"site {site}: weights were loaded that were saved after step 3" in told
        assert f"what {LOSSY[method]!r} had not sent yet of the gradients before is lost" in told
        assert "session.state_dict(), or og.Checkpoints" in told


@pytest.mark.parametrize("session_first", [False, True])
@pytest.mark.parametrize("method", LOSSY)
def test_with_the_session_nothing_is_lost_and_nothing_told(method, session_first):
    def body(group):
        first = Training(group, LOSSY[method])
        first.steps(3)
        saved, of_session = written(first.model.state_dict()), written(first.session.state_dict())
        first.session.detach()
        second = Training(group, LOSSY[method])
        if session_first:
            second.session.load_state_dict(of_session)
        second.model.load_state_dict(saved)
        if not session_first:
            second.session.load_state_dict(of_session)
        second.steps(2)
        second.session.detach()

    assert told_by(body) == []


@pytest.mark.parametrize("method", LOSSY)
def test_other_weights_in_a_training_that_owes_are_told_of(method):
    def body(group):
        training = Training(group, LOSSY[method])
        other = {n: torch.ones_like(t) for n, t in training.model.state_dict().items()}
        training.steps(3)
        training.model.load_state_dict(other)
        training.steps(2)
        training.session.detach()

    found = told_by(body)
    assert len(found) == 2
    for told in found:
        assert "what is owed after step 3 is of other weights, and is sent all the same" in told
        assert "is lost" not in told


@pytest.mark.parametrize("method", LOSSY)
def test_other_weights_for_a_while_are_none_of_its_business(method):
    """As averaged ones, of which an evaluation is made."""

    def body(group):
        training = Training(group, LOSSY[method])
        training.steps(3)
        own = {n: t.clone() for n, t in training.model.state_dict().items()}
        training.model.load_state_dict({n: t / 2 for n, t in own.items()})
        with torch.no_grad():
            training.model(torch.ones(1, 20))
        training.model.load_state_dict(own)
        training.steps(1)
        training.session.detach()

    assert told_by(body) == []


@pytest.mark.parametrize("method", [*LOSSY, *OWES_NOTHING])
def test_weights_that_owe_nothing_may_be_loaded(method):
    """Those of a plain model before the first step, and those of exact methods at any time."""

    def body(group):
        training = Training(group, {**LOSSY, **OWES_NOTHING}[method])
        training.model.load_state_dict(mlp(20, 24, 20).state_dict())
        training.steps(2)
        if method in OWES_NOTHING:
            training.model.load_state_dict(written(mlp(20, 24, 20).state_dict()))
            training.steps(2)
        training.session.detach()

    assert told_by(body) == []


def test_the_model_is_plain_again_and_so_are_copies():
    def body(group):
        training = Training(group, og.RankDAD(rank=1))
        training.steps(2)
        copied = copy.deepcopy(training.model)
        copied.load_state_dict(training.model.state_dict())
        assert type(copied) is nn.Sequential
        notes = [s._metadata[""] for s in (copied.state_dict(), training.model.state_dict())]
        training.session.detach()
        assert type(training.model) is nn.Sequential
        return [*notes, training.model.state_dict()._metadata[""]]

    assert run_ranks(2, lambda rank, group: body(group))[0] == [
        {"version": 1},
        {"version": 1, "outergrad": 2},
        {"version": 1},
    ]
