"""Parameters that optimizers of the process hold."""

from __future__ import annotations

import torch
from torch.optim import SGD

from outergrad.capture.optimizer_steps import held, held_by_any


def test_an_optimizer_that_is_not_made_yet_holds_nothing():
    """Another thread may be making it, or its constructor has raised and the error keeps it."""
    p = torch.nn.Parameter(torch.zeros(2))
    half_made, made = SGD.__new__(SGD), SGD([p], lr=0.1)
    assert held(half_made) == set()
    assert held(made) == {id(p)}
    assert held_by_any({id(p): "p"}) == {"p"}
