"""Groups of samples: labels that the loop gives for the samples of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from outergrad.capture.class_swap import ClassSwap
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.units import Units
from outergrad.capture.weighting import samples_in


class Groups:
    """Labels for the samples of each forward of the model, for recorders that ask for groups.

    Each list is taken once, so labels of an earlier batch are never used for a later one.

    Attributes:
        labels: of the samples of the latest forward with gradients; None if it was given none.
        are_given: True once the loop has given labels.
    """

    def __init__(self) -> None:
        self.labels: tuple[str, ...] | None = None
        self.are_given = False
        self._given = Units("session.groups()")
        self._swap: ClassSwap | None = None

    @property
    def can_be_taken(self) -> bool:
        """True if the model's forwards are watched."""
        return self._swap is not None

    def say(self, labels: Iterable[Any]) -> None:
        """Sets the labels of the next forward's samples.

        Raises:
            TypeError: a label is neither a whole number nor a text.
        """
        self._given.say(labels)
        self.are_given = True

    def watch(self, model: nn.Module) -> None:
        """Takes labels at the model's forwards from now on."""
        self._swap = ClassSwap(model, self._forward)

    def remove(self) -> None:
        """Stops it and gives the model its own class back."""
        if self._swap is not None:
            self._swap.restore()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self._swap is not None
        if current_task() == NO_TASK and torch.is_grad_enabled():
            self.labels = self._given.take(samples_in([*args, *kwargs.values()]))
        return self._swap.plain_forward(*args, **kwargs)
