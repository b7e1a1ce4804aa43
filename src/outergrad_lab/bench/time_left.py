"""Estimates of the remaining time of a training to a loss."""

from __future__ import annotations

from collections import defaultdict
from math import inf, isfinite, log

from outergrad._amounts import duration
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.until import Mark, is_done


def steps_left(marks: list[Mark], wanted: float) -> float:
    """Estimates the steps to a loss, if it falls by the same share per step as in the last half.

    Args:
        marks: Marks of one method so far.
        wanted: The loss.

    Returns:
        Number of steps; infinity where the loss does not fall, or nothing is known yet.
    """
    now, before = marks[-1], marks[(len(marks) - 1) // 2]
    if now.loss <= wanted:
        return 0.0
    if before is now or not isfinite(before.loss) or not now.loss < before.loss:
        return inf
    per_step = log(before.loss / now.loss) / (now.steps - before.steps)
    return log(now.loss / wanted) / per_step


class TimeLeft:
    """Estimates the remaining time from the marks of all methods.

    Args:
        plan: Settings of the benchmark.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._marks = plan, defaultdict[str, list[Mark]](list)

    def told(self, method: str, mark: Mark) -> str:
        """Returns a line about a method's loss and the remaining time of all methods."""
        self._marks[method].append(mark)
        left = duration(self.seconds())
        return f"{method} at loss {mark.loss:.3f} of {self._plan.until_loss:g}, about {left} left"

    def seconds(self) -> float:
        """Remaining seconds of steps by all methods; those not begun count as the others do."""
        left = [self._seconds(marks) for marks in self._marks.values()]
        return sum(left) * len(self._plan.methods) / len(left)

    def _seconds(self, marks: list[Mark]) -> float:
        """Remaining seconds of one method, at most until it is abandoned."""
        plan, now = self._plan, marks[-1]
        if is_done(plan, now):
            return 0.0
        assert plan.until_loss is not None
        steps = min(steps_left(marks, plan.until_loss), plan.max_steps - now.steps)
        return min(steps * now.seconds / now.steps, plan.seconds - now.seconds)
