"""How long a training to a loss will take yet."""

from __future__ import annotations

from collections import defaultdict
from math import inf, isfinite, log

from outergrad._amounts import duration
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.until import Mark, is_done


def steps_left(marks: list[Mark], wanted: float) -> float:
    """Steps until a loss, if it goes on to fall by as large a share per step as in the last half.

    Args:
        marks: Of one method so far.
        wanted: The loss.

    Returns:
        infinity where it does not fall, or is not known yet.
    """
    now, before = marks[-1], marks[(len(marks) - 1) // 2]
    if now.loss <= wanted:
        return 0.0
    if before is now or not isfinite(before.loss) or not now.loss < before.loss:
        return inf
    per_step = log(before.loss / now.loss) / (now.steps - before.steps)
    return log(now.loss / wanted) / per_step


class TimeLeft:
    """Estimates it from the marks of all methods.

    Args:
        plan: What is measured.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._marks = plan, defaultdict[str, list[Mark]](list)

    def told(self, method: str, mark: Mark) -> str:
        """Where a method is, and how long all of them will take yet."""
        self._marks[method].append(mark)
        left = duration(self.seconds())
        return f"{method} at loss {mark.loss:.3f} of {self._plan.until_loss:g}, about {left} left"

    def seconds(self) -> float:
        """Of steps, by all methods in turns; what has not begun is taken to be as the others."""
        left = [self._seconds(marks) for marks in self._marks.values()]
        return sum(left) * len(self._plan.methods) / len(left)

    def _seconds(self, marks: list[Mark]) -> float:
        """No more than until the method is given up."""
        plan, now = self._plan, marks[-1]
        if is_done(plan, now):
            return 0.0
        assert plan.until_loss is not None
        steps = min(steps_left(marks, plan.until_loss), plan.max_steps - now.steps)
        return min(steps * now.seconds / now.steps, plan.seconds - now.seconds)
