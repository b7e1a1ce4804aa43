"""From what the messages of a step brought to `param.grad`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from outergrad.buckets.bucket import Bucket, Result, Sender
from outergrad.core.model import Model
from outergrad.linalg.gradients import scaled
from outergrad.planning.plan import Planner
from outergrad.step.calls import accumulate, overwrite


class Writer:
    """Writes the mean gradients of one step, message by message.

    Args:
        model: what they belong to.
        planner: learns which units have gradients besides their factors.
        sender: of the step.
    """

    def __init__(self, model: Model, planner: Planner, sender: Sender) -> None:
        self._model, self._planner, self._sender = model, planner, sender
        self._mixed: dict[str, Tensor] = {}

    def write(self, bucket: Bucket, result: Result) -> None:
        """Writes what one message brought."""
        used = self._sender.used
        means = {name: g for name, g in result.means.items() if name in used}
        self._measure(means)
        overwrite(self._model, means)
        missing = (bucket.params & used) - set(result.additions) - set(means)
        additions = {name: g for name, g in result.additions.items() if name in used}
        additions.update(self._zeros(missing))
        not_yet = {n: additions.pop(n) for n in result.mixed if n in additions}
        self._measure(additions, formed=False, not_yet=not_yet)
        self._mixed.update(not_yet)
        accumulate(self._model, additions)

    @torch.no_grad()
    def _measure(
        self, means: Mapping[str, Tensor], *, formed: bool = True, not_yet: Collection[str] = ()
    ) -> None:
        """Before `param.grad` is overwritten: what is formed is this site's own gradient."""
        reading = self._sender.reading
        if reading is not None:
            for name in not_yet:
                reading.leave_out(name)
            for name, mean in means.items():
                own = self._model.params[name].grad if formed else None
                own = None if own is None else scaled(own, self._sender.scale)
                reading.mean(name, own, mean)

    def mixes(self, last: Result) -> bool:
        """Whether there is something to be shared besides, also after this one is written."""
        return bool(self._mixed or last.mixed)

    def share_mixed(self) -> None:
        """All-reduces what autograd had for parameters whose factors were also sent."""
        mixed, headers = self._mixed, self._sender.headers
        if not mixed:
            return
        self._planner.note_mixed(list(mixed), headers)
        for name in mixed:
            bucket = self._planner.packer.dense_bucket([name])
            overwrite(self._model, bucket.start(self._sender).wait().means)
        accumulate(self._model, mixed)

    def _zeros(self, names: Collection[str]) -> dict[str, Tensor]:
        params = self._model.params
        return {name: torch.zeros_like(params[name], requires_grad=False) for name in names}
