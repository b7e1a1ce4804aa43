"""Queries of autograd's engine about the current backward, and exclusion from torch.compile."""

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
    """Excludes a function and all it calls from torch.compile's tracing, and returns it.

    Otherwise our hooks would be traced when a compiled function calls `backward`. It does the same
    as `torch.compiler.disable`, without the time that its import and its calls take.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None:
        eval_frame.set_code_exec_strategy(code, _WITH_ALL_IT_CALLS)
    return function


def itself_untraced(function: Function) -> Function:
    """Excludes a function, but not the functions it calls, from tracing, and returns it."""
    eval_frame.set_code_exec_strategy(function.__code__, _ITSELF)  # type: ignore[attr-defined]
    return function


current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward (graph task) that runs in this thread, or NO_TASK."""


def will_run(node: Any) -> bool:
    """True if the current backward reaches a node; False for None, a node that is gone.

    Raises:
        RuntimeError: the node accumulates a parameter's gradient, which `torch.autograd.grad`
            returns instead.
    """
    if node is None:
        return False
    if torch._C._will_engine_execute_node(node):
        return True
    # The engine's set of nodes lacks the root, where a backward starts: compare the running node.
    return node is torch._C._current_autograd_node()


def in_distributed_autograd() -> bool:
    """True during a `torch.distributed.autograd` (RPC) backward, whose engine runs other nodes."""
    module = sys.modules.get("torch.distributed.autograd")
    try:
        about = {} if module is None else module._get_debug_info()
    except (RuntimeError, AttributeError):  # RPC is not initialised, or was shut down
        return False
    return int(about.get("num_current_backward_passes", 0)) > 0


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Queues an `untraced` callback that runs before the current backward returns without error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_nested() -> bool:
    """True if the current backward was started within another one, by a custom function or a hook.

    Autograd has a thread per CUDA device, whose stack does not show the top-level call. There, a
    backward that a hook starts looks like a top-level one.
    """
    runs, frame = 0, sys._getframe()
    while frame is not None:
        if runs and id(frame.f_code) in _NODES:  # the id, as hashing a code object reads all of it
            return True
        runs += frame.f_code is _RUN
        frame = frame.f_back
    return runs > 1


def refuse_nested_backward() -> None:
    """Raises if the current backward, which leaves gradients in parameters, is nested in another.

    Raises:
        RuntimeError: it is nested, as in reentrant checkpointing. Parameters would be "ready" once
            per checkpoint, and the sites would exchange parts of a step.
    """
    if is_nested():
        raise RuntimeError(
            "a backward runs inside another one and leaves gradients in parameters, as "
            "checkpoint(use_reentrant=True) does; use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False); a custom function should call torch.autograd.grad in its "
            "backward, and return the gradients of parameters that it took as inputs"
        )
