"""Functions that torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

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
