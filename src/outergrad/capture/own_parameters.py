"""Whether a module still has the parameters that a session watches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn

from outergrad.capture.tap import WatchedParameter
from outergrad.capture.untappable import in_functional_call


class OwnParameters:
    """The parameters of some modules, and where they stood when these were distributed.

    Args:
        modules: the modules.
        watched: those of their parameters that are trained.
    """

    def __init__(self, modules: Iterable[nn.Module], watched: Iterable[WatchedParameter]) -> None:
        places = {
            id(p): (module, name.split("."))
            for module in modules
            for name, p in module.named_parameters()
        }
        self._places = [(w, *places[id(w.parameter)]) for w in watched]

    def are_there(self) -> bool:
        """Whether they are; not if somebody passes weights of their own (functional_call).

        Raises:
            RuntimeError: they were replaced or converted after `distribute`.
        """
        for watched, module, path in self._places:
            found = reduce(_child, path, module)
            if found is watched.parameter and found.dtype == watched.dtype:
                continue
            compiles = torch.compiler.is_dynamo_compiling()  # it cannot look at the stack
            passed = not compiles and in_functional_call()
            if not passed and (found is None or isinstance(found, nn.Parameter)):
                raise RuntimeError(
                    f"{watched.name!r} was replaced or converted after og.distribute(): call "
                    f"session.detach(), convert or load, and distribute again on every site"
                )
            return False
        return True


def _child(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
