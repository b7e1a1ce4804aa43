"""Which optimizers a training loop steps after each shared step: seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import SeenOptimizers, ignore, listen


class LoopWatch(SeenOptimizers):
    """Notes the steps of the optimizers that hold parameters of a model.

    What one loop has shown is remembered for the next, of which this site may have no batch.

    Args:
        names: of the parameters, by identity.
        steps: how many steps have been shared until now.
    """

    def __init__(self, names: Mapping[int, str], steps: Callable[[], int]) -> None:
        super().__init__(names)
        self._steps = steps
        self._stepped: dict[int, list[str]] = {}
        self._first, self._heeds = 0, True
        self._usual: tuple[str, ...] = ()

    def begin(self) -> None:
        """A loop begins."""
        self._first = self._steps()
        self._stepped.clear()
        listen(self)

    def end(self) -> None:
        """It is over on all sites."""
        ignore(self)

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Steps meanwhile are not the loop's."""
        self._heeds = False
        try:
            yield
        finally:
            self._heeds = True

    def learn(self) -> None:
        """It is over here: learns what followed each step, if that was the same every time."""
        made = range(self._first + 1, self._steps() + 1)
        patterns = {tuple(self._stepped.get(step, ())) for step in made}
        if patterns:
            self._usual = patterns.pop() if len(patterns) == 1 else ()

    def repeat(self) -> None:
        """Does what the loop does after a shared step."""
        optimizers = self.present
        for name in self._usual:
            if name in optimizers:
                optimizers[name].step()

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        holder = self.holder(optimizer)
        if holder is not None and self._heeds:
            super().after_step(optimizer)
            self._stepped.setdefault(self._steps(), []).append(holder)
