"""Gradients side by side in an all-reduce, as in DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from outergrad.buckets.bucket import Bucket, Pending, Result, StepContext
from outergrad.core.transport import Work
from outergrad.linalg.finite import is_finite
from outergrad.messages.checksum import checksum
from outergrad.messages.wire import State

_BUFFERS = 2


class DenseBucket(Bucket):
    """Parameters of one dtype whose gradients travel in one all-reduce.

    There are two buffers, which take turns: a sum is kept for a step. Their last two elements
    count the sites that are surprised and those whose step is void.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]) -> None:
        self.params = frozenset(params)
        self.dense_params: Sequence[str] = tuple(params)
        self._params = dict(params)
        self._buffers: list[tuple[Tensor, dict[str, Tensor]]] = []

    @property
    def is_kept(self) -> bool:
        """The sum."""
        return True

    def start(self, context: StepContext) -> Pending:
        """Copies what is in `param.grad` (nothing counts as zero) and starts the all-reduce."""
        buffer, views = self._scratch()
        for name, view in views.items():
            context.fill(name, self._params[name], view)
            traffic = context.comm.cost.all_reduce(view.nbytes)
            context.add(name, "dense", **traffic._asdict())
        if context.skips_bad and not is_finite(buffer[:-2]):
            for name, view in views.items():
                context.check(name, [view])
        buffer[-2] = float(context.state == State.SURPRISED)
        buffer[-1] = float(context.state.is_void)
        work = context.comm.all_reduce(buffer)
        return _DensePending(work, views)

    def _scratch(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The buffer that the step before does not have, and views of it."""
        if len(self._buffers) < _BUFFERS:
            sizes = [p.numel() for p in self._params.values()]
            first = next(iter(self._params.values()))
            buffer = first.new_empty(sum(sizes) + 2, requires_grad=False)
            pairs = zip(self._params.items(), buffer[:-2].split(sizes), strict=True)
            self._buffers.insert(0, (buffer, {n: part.view(p.shape) for (n, p), part in pairs}))
        else:
            self._buffers.reverse()
        return self._buffers[0]


class _DensePending(Pending):
    def __init__(self, work: Work, views: dict[str, Tensor]) -> None:
        self._work, self._views = work, views
        self._sum: Tensor | None = None

    def wait(self) -> Result:
        buffer = self._sum = self._work.wait() if self._sum is None else self._sum
        return Result(self._views, state=State.of(*buffer[-2:].tolist()), digest=checksum(buffer))
