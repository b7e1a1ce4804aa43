"""Record of the optimizers that a training loop steps after each shared step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch.optim import Optimizer

from outergrad.capture.optimizer_steps import SeenOptimizers, ignore, listen


class LoopWatch(SeenOptimizers):
    """Records the steps of the optimizers that hold parameters of a model.

    The pattern of one loop is remembered for the next, in which this site may have no batch.

    Args:
        names: full names of the parameters, by id.
        steps: returns the number of shared steps so far.
    """

    def __init__(self, names: Mapping[int, str], steps: Callable[[], int]) -> None:
        super().__init__(names)
        self._steps = steps
        self._stepped: dict[int, list[str]] = {}
        self._first, self._heeds = 0, True
        self._usual: tuple[str, ...] = ()

    def begin(self) -> None:
        """Starts to record a loop."""
        self._first = self._steps()
        self._stepped.clear()
        listen(self)

    def end(self) -> None:
        """Stops recording, once the loop is over on all sites."""
        ignore(self)

    @contextmanager
    def passing_over(self) -> Iterator[None]:
        """Context in which optimizer steps do not count as the loop's."""
        self._heeds = False
        try:
            yield
        finally:
            self._heeds = True

    def learn(self) -> None:
        """Learns, after this site's loop, the optimizers it stepped; none if steps differed."""
        made = range(self._first + 1, self._steps() + 1)
        patterns = {tuple(self._stepped.get(step, ())) for step in made}
        if patterns:
            self._usual = patterns.pop() if len(patterns) == 1 else ()

    def repeat(self) -> None:
        """Steps the optimizers that the loop steps after each shared step."""
        optimizers = self.present
        for name in self._usual:
            if name in optimizers:
                optimizers[name].step()

    def after_step(self, optimizer: Optimizer) -> None:
        """Records the step of an optimizer."""
        holder = self.holder(optimizer)
        if holder is not None and self._heeds:
            super().after_step(optimizer)
            self._stepped.setdefault(self._steps(), []).append(holder)
