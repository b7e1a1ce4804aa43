"""From what the messages of a step brought to `param.grad`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Result, StepContext
from outergrad.core.model import Model
from outergrad.linalg.gradients import scaled
from outergrad.planning.plan import Planner
from outergrad.step import param_grad


class Writer:
    """Writes the mean gradients of one step, message by message.

    Args:
        model: what they belong to.
        planner: learns which units have gradients besides their factors.
        context: of the step.
    """

    def __init__(self, model: Model, planner: Planner, context: StepContext) -> None:
        self._model, self._planner, self._context = model, planner, context
        self._has_autograd_grad: dict[str, Tensor] = {}

    def write(self, bucket: Bucket, result: Result) -> None:
        """Writes what one message brought."""
        used = self._context.used
        means = {name: g for name, g in result.means.items() if name in used}
        self._measure(means)
        param_grad.overwrite(self._model.params, means)
        missing = (bucket.params & used) - set(result.additions) - set(means)
        additions = {name: g for name, g in result.additions.items() if name in used}
        additions.update(self._zeros(missing))
        not_yet = {n: additions.pop(n) for n in result.has_autograd_grad if n in additions}
        self._measure(additions, formed=False, not_yet=not_yet)
        self._has_autograd_grad.update(not_yet)
        param_grad.add(self._model.params, additions)

    @torch.no_grad()
    def _measure(
        self, means: Mapping[str, Tensor], *, formed: bool = True, not_yet: Collection[str] = ()
    ) -> None:
        """Before `param.grad` is overwritten: what is formed is this site's own gradient."""
        reading = self._context.reading
        if reading is not None:
            for name in not_yet:
                reading.leave_out(name)
            for name, mean in means.items():
                own = self._model.params[name].grad if formed else None
                own = None if own is None else scaled(own, self._context.scale)
                reading.mean(name, own, mean)

    def mixes(self, last: Result) -> bool:
        """Whether there is something to be shared besides, also after this one is written."""
        return bool(self._has_autograd_grad or last.has_autograd_grad)

    def share_autograd_grad(self) -> None:
        """All-reduces what autograd had for parameters whose factors were also sent."""
        has_autograd_grad, headers = self._has_autograd_grad, self._context.headers
        if not has_autograd_grad:
            return
        self._planner.note_autograd_grad(list(has_autograd_grad), headers)
        for name in has_autograd_grad:
            bucket = self._planner.packer.dense_bucket([name])
            param_grad.overwrite(self._model.params, bucket.start(self._context).wait().means)
        param_grad.add(self._model.params, has_autograd_grad)

    def _zeros(self, names: Collection[str]) -> dict[str, Tensor]:
        params = self._model.params
        return {name: torch.zeros_like(params[name], requires_grad=False) for name in names}
