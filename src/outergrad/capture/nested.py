"""Whether a backward runs inside another one."""

from __future__ import annotations

import sys

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

REENTRANT = (
    "a backward runs inside another one and leaves gradients in parameters, as "
    "checkpoint(use_reentrant=True) does; use torch.utils.checkpoint.checkpoint(..., "
    "use_reentrant=False); a custom function should call torch.autograd.grad in its backward, and "
    "return the gradients of parameters that it took as inputs"
)
_RUN = _engine_run_backward.__code__
_NODES = {
    method.__code__
    for name, method in vars(BackwardCFunction).items()
    if name in ("apply", "apply_boxed")
}


def is_nested() -> bool:
    """Whether the current backward was started by another one: by a custom function, or a hook.

    Autograd has a thread per CUDA device, where nothing is seen of a top-level call: there a
    backward that a hook has started is not told from one.
    """
    runs, frame = 0, sys._getframe()
    while frame is not None:
        if runs and frame.f_code in _NODES:
            return True
        runs += frame.f_code is _RUN
        frame = frame.f_back
    return runs > 1


def refuse_nested_backward() -> None:
    """Checks that the backward that leaves gradients in parameters is not a nested one.

    Raises:
        RuntimeError: it is, as in reentrant checkpointing: parameters would be "ready" once per
            checkpoint, and the sites would exchange parts of a step.
    """
    if is_nested():
        raise RuntimeError(REENTRANT)
