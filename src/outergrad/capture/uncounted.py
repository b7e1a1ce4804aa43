"""Detection of weight updates without a counted optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from outergrad.capture.engine import current_task, untraced
from outergrad.messages.checksum import sum_of_bits

_FEWEST = 8
"""Backward passes before anything is concluded, even if exchanges are fewer steps apart."""


class UncountedUpdates:
    """Counts backward passes since the last counted step, and checks if weights change meanwhile.

    Several passes per step are gradient accumulation, in which the weights do not change. So sums
    of the weights' bits are compared at the 2nd, 4th, 8th, 16th ... pass without a counted step. A
    loop with a step per pass never pays for a sum. Version counters would be cheaper, but
    `p.data.sub_(...)` and a step on a flat tensor of which `p` is a part do not raise them.

    Args:
        params: the trained parameters, by name.
        k: number of steps between two exchanges.
        on_first: called at the first pass after a counted step, or after the start.
        refuse: raises an error, given a parameter's name and a description.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        k: int,
        on_first: Callable[[], None],
        refuse: Callable[[str, str], None],
    ) -> None:
        self._params, self._on_first, self._refuse = params, on_first, refuse
        self._task = -1
        self._most = max(k, _FEWEST)
        self._longest = 0
        self.passes = 0
        """Number of backward passes since the last counted step."""
        self._seen: dict[str, int] | None = None
        self._changed: list[str] = []
        self._left: dict[str, int] = {}
        self._undone = 0

    def restart(self) -> None:
        """Starts a new count of passes when a step was counted."""
        self._longest = max(self._longest, self.passes)
        self.passes, self._seen, self._changed = 0, None, []

    def exchanged(self, names: Iterable[str]) -> None:
        """Records the values that an exchange has left in parameters no counted optimizer holds."""
        self._left = {name: sum_of_bits(self._params[name]) for name in names}

    def since(self, start: Mapping[str, Tensor]) -> str | None:
        """Returns the first parameter that differs from `start`, if passes followed a step."""
        if not self.passes:
            return None
        differs = (name for name, p in self._params.items() if not p.detach().equal(start[name]))
        return next(differs, None)

    @untraced
    def on_gradient(self) -> None:
        """Notes that a backward has a gradient for one of the parameters."""
        task = current_task()
        if task != self._task:
            self._task = task
            self._begin()

    def _begin(self) -> None:
        self.passes += 1
        n = self.passes
        if n == 1:
            self._look_back()
            self._on_first()
        elif n & (n - 1) == 0:
            self._look()
        # One change may be a perturbation between two passes of one step (SAM). Such a step has
        # fewer passes than twice the longest one so far.
        if len(self._changed) > 1 and n >= max(self._most, 2 * self._longest):
            self._refuse(self._changed[-1], told(n))

    def _look_back(self) -> None:
        """Raises if weights were overwritten after two exchanges in a row: once may be chance."""
        left, self._left = self._left, {}
        if not left:
            return
        differs = (name for name, bits in left.items() if sum_of_bits(self._params[name]) != bits)
        name = next(differs, None)
        self._undone = 0 if name is None else self._undone + 1
        if name is not None and self._undone > 1:
            self._refuse(name, _UNDONE)

    def _look(self) -> None:
        now = {name: sum_of_bits(p) for name, p in self._params.items()}
        if self._seen is not None:
            differs = (name for name, bits in now.items() if bits != self._seen[name])
            self._changed += [name] if (name := next(differs, None)) else []
        self._seen = now


def told(passes: int) -> str:
    """Returns the description and the remedy, with `{name}` in place of the parameter's name."""
    return (
        f"has made {passes} backward passes without a step of a torch.optim optimizer that holds "
        f"the model's parameters, and {{name}} has changed: no exchange would ever come. Call "
        f"session.stepped() on every site after each update of the weights; if they are copies (of "
        f"float32 masters, of a flat tensor), copy them back from the model where it returns True"
    )


_UNDONE = (
    "has changed {name} behind two exchanges, and no optimizer that steps holds it: if it is "
    "copied from a master, that undoes each exchange. Let an optimizer hold it, or no parameter of "
    "the model but copies of all, call session.stepped() on every site after each update, and copy "
    "the weights back from the model where it returns True"
)
