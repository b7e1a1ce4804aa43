"""Nodes are held as long as their graph lives, and no longer than until the next forward."""

from __future__ import annotations

import sys
from weakref import ref

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad._live_nodes import LiveNodes
from ranks import run_ranks


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, *deltas):
        return 2 * deltas[0]


def _graph() -> torch.Tensor:
    return Double.apply(torch.ones(3, requires_grad=True))


def test_a_node_lives_in_python_as_long_as_its_graph() -> None:
    nodes, y = LiveNodes(), _graph()
    nodes.hold(y.grad_fn)
    loss, node = (y * y).sum(), ref(y.grad_fn)
    references = sys.getrefcount(node())
    del y
    nodes.hold(_graph().grad_fn)
    assert node() is not None
    assert sys.getrefcount(node()) >= references - 1  # the holder still is one of them
    del loss
    nodes.hold(_graph().grad_fn)
    assert node() is None


@pytest.mark.parametrize("forwards", [1, 500])
def test_one_that_lives_long_does_not_keep_those_behind_it(forwards) -> None:
    nodes, first = LiveNodes(), _graph()
    nodes.hold(first.grad_fn)
    kept = []
    for _ in range(forwards):
        y = _graph()
        nodes.hold(y.grad_fn)
        kept.append(ref(y.grad_fn))
        other = y  # so that each lives until the next one is there
        del y
    del other
    nodes.hold(first.grad_fn)
    assert sum(node() is not None for node in kept) <= 3


def test_forwards_without_backward_keep_no_activations() -> None:
    def body(rank, group):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])
        session = og.distribute(model, og.DAD(reveal="activations"), group=group)
        inputs = []
        for _ in range(20):
            x = Double.apply(torch.randn(3, 8, requires_grad=True))
            inputs.append(ref(x.grad_fn))
            model(x)
            del x
        model(torch.randn(3, 8)).sum().backward()
        session.detach()
        return sum(node() is not None for node in inputs)

    assert run_ranks(2, body) == [0, 0]
