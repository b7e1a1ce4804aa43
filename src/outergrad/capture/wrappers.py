"""Detection of wrappers that synchronise gradients themselves, around or in a distributed model."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
"""Names of classes that are refused inside a model; importing some of them would take long."""

_MODULES_OF_OTHERS = (
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("apex.parallel.distributed", "DistributedDataParallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
)
_FORWARD = DistributedDataParallel.forward.__code__


def calling_wrapper(shared: Collection[int]) -> nn.Module | None:
    """Returns the wrapper through which a model is being called, if it synchronises its gradients.

    The stack is searched, because torch.nn.parallel records the active wrapper per process, and
    sites may be threads.

    Args:
        shared: ids of the model's parameters that are shared between the sites.
    """
    codes = {id(_FORWARD), *map(id, _codes_of_others())}  # to hash a code reads all of it
    frame = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in codes:
            wrapper = frame.f_locals["self"]
            if not exchanged_by(wrapper).isdisjoint(shared):
                return wrapper
        frame = frame.f_back
    return None


def wrapper_inside(model: nn.Module, shared: Collection[int]) -> nn.Module | None:
    """Returns the first wrapper in a model that synchronises gradients of shared parameters."""
    for module in model.modules():
        names = {base.__name__ for base in type(module).__mro__}
        if not names.isdisjoint(WRAPPERS) and not exchanged_by(module).isdisjoint(shared):
            return module
    return None


def exchanged_by(wrapper: Any) -> set[int]:
    """Returns ids of the parameters that a wrapper synchronises, without those that it ignores."""
    own = getattr(wrapper, "_module_parameters", None)
    return set(map(id, wrapper.parameters() if own is None else own))


def _codes_of_others() -> Iterator[CodeType]:
    for module, name in _MODULES_OF_OTHERS:
        found = getattr(sys.modules.get(module), name, None)  # if the library is imported
        code = getattr(getattr(found, "forward", None), "__code__", None)
        if code is not None:
            yield code
