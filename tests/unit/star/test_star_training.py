"""Whole trainings around a hub: the gradients are those of torch.distributed."""

from __future__ import annotations

import pytest
import torch
from test_own_transport import METHODS, build, pooled, train

import outergrad as og
from cases import relative_error
from covering import rest_slow
from ranks import run_ranks
from stars import on_star

SAME_BITS = {"dad forced", "edad", "rank-dad"}
"""What is gathered; sums of two sites have the same bits in any order, too."""


@pytest.mark.parametrize("name", rest_slow(METHODS, [*METHODS][::3]))
def test_gradients_are_those_of_torch_distributed(name):
    def on(rank, **where):
        model = build()
        session = og.distribute(model, METHODS[name], **where)
        found = list(train(model, rank))
        session.detach()
        return found

    around = on_star(2, lambda rank, one: on(rank, transport=one))
    straight = run_ranks(2, lambda rank, group: on(rank, group=group))
    expected = pooled(2)
    for mine, theirs in zip(around, straight, strict=True):
        for step, gradients in enumerate(mine):
            for k, gradient in enumerate(gradients):
                assert relative_error(gradient, expected[step][k]) < 1e-12
                assert relative_error(gradient, theirs[step][k]) < 1e-12
        if name in SAME_BITS:
            assert all(map(torch.equal, mine[-1], theirs[-1]))
    assert all(map(torch.equal, *(site[-1] for site in around)))


def test_two_sessions_of_one_process_share_the_line():
    """Also where each has a `Star` of its own, as in two calls of og.distribute."""

    def body(rank, one):
        models = [build(), build()]
        others = [one, og.Star(one.hub, kit=one.kit)]
        sessions = [
            og.distribute(model, og.DAD(), transport=transport)
            for model, transport in zip(models, others, strict=True)
        ]
        assert sessions[0]._at.comm.key is sessions[1]._at.comm.key
        found = [next(train(model, rank)) for model in models]
        for session in sessions:
            session.detach()
        return found

    for first, second in on_star(2, body):
        assert all(map(torch.equal, first, second))
