"""Nodes are found as long as their graph lives, even if Python lost them, and never kept alive."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.capture import node_ref as _node_ref
from outergrad.capture.node_ref import NodeRef
from ranks import run_ranks


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, *deltas):
        return 2 * deltas[0]


def doubled() -> torch.Tensor:
    return Double.apply(torch.ones(3, requires_grad=True))


def lose(node: NodeRef) -> None:
    """What the garbage collector does to a node that it takes for garbage."""
    with torch.enable_grad():
        other = doubled()
    node.known = ref(other.grad_fn)
    del other
    assert node.known() is None


@pytest.mark.parametrize("lost", [False, True])
def test_a_node_is_there_as_long_as_its_graph(lost) -> None:
    y = doubled()
    node = NodeRef(y.grad_fn)
    loss = (y * y).sum()
    del y
    if lost:
        lose(node)
    assert node.lives()
    assert node() is loss.grad_fn.next_functions[0][0].next_functions[0][0]
    del loss
    gc.collect()
    assert not node.lives()
    assert node() is None


class Forgetful(NodeRef):
    """Of which Python has always lost the node."""

    __slots__ = ()

    def __call__(self):
        lose(self)
        return super().__call__()


@pytest.mark.parametrize("forwards", [1, 3])
def test_a_backward_announces_uses_whose_nodes_were_lost(forwards, monkeypatch) -> None:
    """What another thread's garbage collection may do, on one site, in every step."""

    x = torch.randn(2, forwards, 3, 6)

    def body(rank, group):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        session = og.distribute(model, og.DAD(reveal="activations", always=True), group=group)
        for _ in range(2):
            model.zero_grad()
            sum(model(part).square().sum() for part in x[rank]).backward()
        session.detach()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (sum(model(part).square().sum() for part in x.flatten(0, 1)) / 2).backward()
        return found, [p.grad for p in model.parameters()]

    monkeypatch.setattr(_node_ref, "NodeRef", Forgetful)
    for found, pooled in run_ranks(2, body):
        torch.testing.assert_close(found, pooled)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", [og.DAD(reveal="activations"), og.EDAD(inputs="raw")])
def test_nothing_is_left_of_a_model_that_nobody_holds(method, backward) -> None:
    def body(rank, group):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        session = og.distribute(model, method, group=group)
        for _ in range(3):
            model(torch.randn(2, 64)).sum().backward()
        if not backward:
            model(torch.randn(2, 64))
        weight = ref(model[0].weight)
        session.detach()
        del model, session
        return weight

    weights = run_ranks(2, body)
    gc.collect()
    assert [weight() for weight in weights] == [None, None]


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
        session.detach()
        return sum(node() is not None for node in inputs)

    assert run_ranks(2, body) == [0, 0]
