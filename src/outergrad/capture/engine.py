"""What is asked of autograd's engine and of torch.compile: which backward runs, what it reaches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

NO_TASK = -1
_RUN = _engine_run_backward.__code__
_NODES = {
    id(method.__code__)
    for name, method in vars(BackwardCFunction).items()
    if name in ("apply", "apply_boxed")
}

_SKIP = eval_frame._FrameAction.SKIP
_WITH_ALL_IT_CALLS = eval_frame._FrameExecStrategy(_SKIP, _SKIP)
_ITSELF = eval_frame._FrameExecStrategy(_SKIP, eval_frame._FrameAction.DEFAULT)

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """The function, of which nothing is traced when it is called from outside of a graph.

    A compiled function that calls `backward` would else have traced what our hooks do there. As
    `torch.compiler.disable`, without the time that its import and its calls take.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None:
        eval_frame.set_code_exec_strategy(code, _WITH_ALL_IT_CALLS)
    return function


def itself_untraced(function: Function) -> Function:
    """The function; of what it calls from outside of a graph is traced what would be without it."""
    eval_frame.set_code_exec_strategy(function.__code__, _ITSELF)  # type: ignore[attr-defined]
    return function


current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Identity of the backward that runs in this thread, or NO_TASK."""


def will_run(node: Any) -> bool:
    """Whether the current backward reaches a node; not if that is None, because it is gone.

    Raises:
        RuntimeError: it is a parameter's, and `torch.autograd.grad` returns its gradient instead.
    """
    if node is None:
        return False
    if torch._C._will_engine_execute_node(node):
        return True
    return node is torch._C._current_autograd_node()  # where a backward starts, torch forgets it


def in_distributed_autograd() -> bool:
    """Whether `torch.distributed.autograd` (RPC) is at work, whose engine runs other nodes."""
    module = sys.modules.get("torch.distributed.autograd")
    try:
        about = {} if module is None else module._get_debug_info()
    except (RuntimeError, AttributeError):  # RPC has not begun, or is over
        return False
    return int(about.get("num_current_backward_passes", 0)) > 0


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs an `untraced` callback when the current backward has succeeded, before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_nested() -> bool:
    """Whether the current backward was started by another one: by a custom function, or a hook.

    Autograd has a thread per CUDA device, where nothing is seen of a top-level call: there a
    backward that a hook has started is not told from one.
    """
    runs, frame = 0, sys._getframe()
    while frame is not None:
        if runs and id(frame.f_code) in _NODES:  # hashing code would read all of it
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
        raise RuntimeError(
            "a backward runs inside another one and leaves gradients in parameters, as "
            "checkpoint(use_reentrant=True) does; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False); a custom function should call torch.autograd.grad in its "
            "backward, and return the gradients of parameters that it took as inputs"
        )
