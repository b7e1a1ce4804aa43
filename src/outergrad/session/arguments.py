"""Checks of the arguments of `distribute`: errors of one line, with the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outergrad.core.sent import StepTap

_LONGEST = 100
"""Number of characters of a value that an error shows."""


def shown(value: object) -> str:
    """Returns a short text for a value in an error; never its weights."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | bytes):
        items = value.values() if isinstance(value, Mapping) else value
        inside = sorted({type(item).__name__ for item in items})
        return f"a {type(value).__name__} of {len(value)} {' and '.join(inside)}".rstrip()
    text = value.__name__ if isinstance(value, type) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def refuse_model(model: Any) -> None:
    """Raises TypeError if the argument is no `torch.nn.Module`."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise TypeError(f"model is the class {model.__name__}: pass an object, {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={shown(model)}: pass a torch.nn.Module first, then the method")


def refuse_inference_mode() -> None:
    """Raises ValueError inside of `torch.inference_mode()`, where nothing can be trained."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "og.distribute() inside torch.inference_mode(), in which nothing can be trained: call "
            "it outside"
        )


def refuse_max_bad_steps(value: Any) -> None:
    """Raises ValueError if `max_bad_steps` is neither None nor an int of 0 or more."""
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(
            f"max_bad_steps={shown(value)}: pass a number of steps, 0 or more, or None"
        )


def refuse_rules(rules: Any) -> None:
    """Raises TypeError unless the argument is a mapping from types of layers to rules."""
    remedy = "pass {**og.RULES, MyLayer: MyRule()}"
    if not isinstance(rules, Mapping):
        raise TypeError(f"rules={shown(rules)}: {remedy}")
    for layer, rule in rules.items():
        if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
            raise TypeError(f"rules={{{shown(layer)}: ...}} is not by a class of layers: {remedy}")
        if isinstance(rule, type) or not callable(getattr(rule, "slots", None)):
            raise TypeError(f"rules={{{layer.__name__}: {shown(rule)}}} is no rule: {remedy}")


def refuse_transport(transport: Any) -> None:
    """Raises TypeError if a transport is a class, or has no method `open`."""
    if isinstance(transport, type):
        raise TypeError(
            f"transport is the class {transport.__name__}: pass an object, as "
            f"og.{transport.__name__}(...)"
        )
    if transport is not None and not callable(getattr(transport, "open", None)):
        raise TypeError(
            f"transport={shown(transport)}: pass an object, as og.Star('site.kit'), or None for "
            f"torch.distributed"
        )


def refuse_tap(tap: Any, mesh: Any) -> None:
    """Raises if the argument is no tap, or one that cannot be told of the steps of a mesh.

    Raises:
        TypeError: it is a class, or has no method `sent`.
        ValueError: it asks for whole steps, of which a rank of a mesh sends a share.
    """
    if isinstance(tap, type):
        raise TypeError(f"tap is the class {tap.__name__}: pass an object, {tap.__name__}(...)")
    if tap is not None and not callable(getattr(tap, "sent", None)):
        raise TypeError(
            f"tap={shown(tap)}: pass an object with a method sent(sent), as og.FileTap(path), or "
            f"None"
        )
    if mesh is not None and isinstance(tap, StepTap):
        raise ValueError(
            f"tap={shown(tap)} asks for whole steps, and with mesh= a rank sends a share of each: "
            f"pass a tap with the method sent(sent) alone"
        )


def refuse_group(group: Any) -> None:
    """Raises if this rank cannot reach others by a group.

    Raises:
        TypeError: it is no process group.
        ValueError: this rank is not in it.
    """
    if group is None or isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER or group == -100:
        raise ValueError(
            "this rank is not in group=: call og.distribute() on the ranks of the group alone, or "
            "pass each rank a group that it is in"
        )
    if callable(getattr(group, "get_group", None)):
        raise TypeError(
            f"group is a {type(group).__name__}: pass mesh= with the dimensions 'site' and "
            f"'local', or group=mesh.get_group(name)"
        )
    raise TypeError(
        f"group={shown(group)}: pass a process group, as torch.distributed.new_group(ranks) "
        f"returns it, or None for the default group"
    )


def refuse_mesh(mesh: Any) -> None:
    """Raises TypeError if a mesh has no method `get_group`."""
    if mesh is not None and not callable(getattr(mesh, "get_group", None)):
        raise TypeError(
            f"mesh={shown(mesh)}: pass a torch.distributed.device_mesh.DeviceMesh with the "
            f"dimensions 'site' and 'local', or group= for sites of one rank"
        )


_LONGEST_S = timedelta.max.total_seconds() / 1000
"""Longest timeout: a sum of several of these is still within a timedelta's range."""


def time_span(timeout: Any) -> timedelta | None:
    """Returns the timeout that `distribute` was given, as a timedelta.

    Raises:
        ValueError: it is not above 0 and finite, or too long.
        TypeError: it is neither a number of seconds nor a timedelta.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | timedelta):
        raise TypeError(f"timeout={shown(timeout)}: pass seconds, as 60.0, or a timedelta")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (math.isfinite(seconds) and 0 < seconds <= _LONGEST_S):
        raise ValueError(
            f"timeout={timeout!r}; use seconds above 0, or a timedelta, or None for the timeout of "
            f"the process group"
        )
    return timedelta(seconds=seconds)
