"""Who is told of backwards, and that nobody else holds it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from outergrad.capture.backward_listeners import FailedBackward, listen_to_backwards


class Listener:
    """Counts."""

    def __init__(self) -> None:
        self.begun, self.failed = 0, list[FailedBackward]()

    def on_backward(self, outputs: Any) -> None:
        self.begun += 1

    def on_failed_backward(self, failed: FailedBackward) -> None:
        self.failed.append(failed)


class Calls(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *deltas: Tensor) -> Any:
        ctx.function()
        return deltas[0], None


def inner() -> None:
    with torch.enable_grad():
        (2 * torch.ones(1, requires_grad=True)).backward()


def test_backwards_are_told_of_but_not_those_inside_another():
    listener, x = Listener(), torch.ones(1, requires_grad=True)
    listen_to_backwards(listener)
    Calls.apply(x, inner).backward()
    assert (listener.begun, listener.failed) == (1, [])
    torch.autograd.grad(2 * x, x)  # leaves no gradient in a parameter
    assert listener.begun == 1


def test_a_backward_that_raises_is_told_of():
    def fails() -> None:
        raise ValueError("in vain")

    listener, x = Listener(), torch.ones(1, requires_grad=True)
    listen_to_backwards(listener)
    with pytest.raises(ValueError, match="in vain"):
        Calls.apply(x, fails).backward()
    assert len(listener.failed) == listener.begun == 1


def test_a_backward_holds_no_listener():
    """It may wait for another site for long, and a session that is dropped meanwhile goes."""
    listeners, x = [Listener() for _ in range(3)], torch.ones(1, requires_grad=True)
    for listener in listeners:
        listen_to_backwards(listener)
    del listener
    gone = [weakref.ref(one) for one in listeners]
    found = []

    def look() -> None:
        listeners.clear()
        found.extend(one() for one in gone)

    Calls.apply(x, look).backward()
    assert found == [None] * 3
