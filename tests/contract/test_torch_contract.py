"""What outergrad relies on inside PyTorch: if an upgrade changes it, this says what changed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from outergrad.capture.engine import at_end_of_backward, current_task, is_nested

runs = torch._C._will_engine_execute_node


class Spy(torch.autograd.Function):
    """A tap without a session."""

    @staticmethod
    def forward(ctx, y, seen, *params):
        ctx.seen = seen
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, delta):
        ctx.seen(delta)
        return delta, None, *(None for _ in ctx.needs_input_grad[2:])


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(3, 4))


def tapped(weight, seen=lambda delta: None, x=None):
    x = torch.randn(2, 4) if x is None else x
    return Spy.apply(F.linear(x, weight.detach()), seen, weight)


def test_ready_event_fires_once_even_without_a_gradient(weight):
    fired = []
    weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
    (tapped(weight).sum() + tapped(weight).sum()).backward()
    assert fired == [None]


def test_hook_before_accumulation_tells_whether_autograd_has_a_gradient(weight):
    seen = []
    weight.register_hook(lambda g: seen.append(g is None))
    tapped(weight).sum().backward()
    (tapped(weight).sum() + weight.sum()).backward()
    assert seen == [True, False]


def test_engine_knows_which_nodes_and_parameters_a_backward_reaches(weight):
    other = nn.Parameter(torch.randn(3))
    nodes = [get_gradient_edge(p).node for p in (weight, other)]
    found = []
    first, second = tapped(weight), tapped(weight)
    taps = [first.grad_fn, second.grad_fn]
    weight.register_hook(lambda g: found.append([runs(node) for node in (*nodes, *taps)]))
    first.sum().backward()
    assert found == [[True, False, True, False]]


def test_engine_does_not_tell_of_the_node_that_a_backward_starts_at(weight):
    """Why `will_run` asks which node runs, too."""
    found = []

    def seen(delta):
        here = torch._C._current_autograd_node()
        found.append((runs(y.grad_fn), here is y.grad_fn))

    y = tapped(weight, seen)
    y.backward(torch.ones_like(y))
    assert found == [(False, True)]


def test_engine_refuses_to_tell_for_leaves_in_autograd_grad(weight):
    node, x = get_gradient_edge(weight).node, torch.randn(2, 4, requires_grad=True)
    answers = []

    def seen(delta):
        try:
            answers.append(runs(node))
        except RuntimeError:
            answers.append("raises")

    torch.autograd.grad(tapped(weight, seen, x).sum(), x)
    torch.autograd.grad(tapped(weight, seen, x).sum(), weight, allow_unused=True)
    assert answers == [False, "raises"]


def test_finaliser_runs_in_backward_and_not_after_an_exception(weight):
    ran, tasks = [], []

    def seen(delta):
        tasks.append(current_task())
        at_end_of_backward(lambda: ran.append(current_task()))

    tapped(weight, seen).sum().backward()
    assert len(ran) == 1

    def boom(delta):
        seen(delta)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        tapped(weight, boom).sum().backward()
    assert len(ran) == 1
    assert tasks[0] != tasks[1]
    assert current_task() == -1


def test_errors_of_the_finaliser_come_out_of_backward(weight):
    def fail():
        raise ArithmeticError("from the finaliser")

    with pytest.raises(ArithmeticError, match="from the finaliser"):
        tapped(weight, lambda delta: at_end_of_backward(fail)).sum().backward()


def test_in_place_operations_may_follow_a_tap(weight):
    deltas = []
    y = tapped(weight, deltas.append)
    F.relu(y, inplace=True).sum().backward()
    assert deltas[0].shape == (2, 3)


def test_in_place_operations_may_not_follow_a_tap_that_returns_a_view(weight):
    """Why taps mark their output dirty."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, p):
            return y.view_as(y)

        @staticmethod
        def backward(ctx, delta):
            return delta, None

    y = View.apply(torch.randn(2, 3, requires_grad=True) * 1, weight)
    with pytest.raises(RuntimeError, match="view"):
        y.relu_()


def test_recomputation_taps_again_inside_the_backward(weight):
    born = []

    def block(x):
        born.append(current_task())
        return tapped(weight, x=x)

    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(lambda x: block(x).exp(), x, use_reentrant=False).sum().backward()
    assert born[0] == -1
    assert born[1] != -1


class Differentiates(torch.autograd.Function):
    """Calls `autograd.grad` for the weight in its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            y = F.linear(x, weight).sum()
        return delta, *torch.autograd.grad(y, weight)


def test_nested_backwards_are_seen_on_the_stack(weight):
    """Hooks of a leaf run for what `autograd.grad` returns, too."""
    nested = []
    weight.register_hook(lambda g: nested.append(is_nested()))
    x = torch.randn(2, 4, requires_grad=True)
    F.linear(x, weight).sum().backward()
    torch.autograd.grad(F.linear(x, weight).sum(), weight)
    Differentiates.apply(x, weight).sum().backward()
    y, inner = F.linear(x, weight.detach()), F.linear(x, weight).sum()
    y.register_hook(lambda _: torch.autograd.grad(inner, weight, retain_graph=True) and None)
    y.sum().backward()
    assert nested == [False, False, True, False, True]


def test_a_graph_that_is_kept_enables_gradients_in_backward(weight):
    """How a tap knows that what it returns is differentiated again."""
    enabled, x = [], torch.randn(2, 4, requires_grad=True)
    y = tapped(weight, lambda delta: enabled.append(torch.is_grad_enabled()), x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    torch.autograd.grad(y.sum(), x, create_graph=True)
    assert enabled == [False, True]


def test_cpu_backward_runs_in_the_calling_thread(weight):
    """Ranks as threads depend on it."""
    threads = []
    tapped(weight, lambda delta: threads.append(threading.current_thread())).sum().backward()
    assert threads == [threading.current_thread()]


def test_autocast_multiplies_in_the_dtype_of_delta(weight):
    deltas = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tapped(weight, deltas.append)
    y.float().sum().backward()
    assert deltas[0].dtype == torch.bfloat16
