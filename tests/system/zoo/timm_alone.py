"""timm without torchvision, which it imports for its data sets and transforms alone.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its import raises, and with it those
of transformers and lightning, which look whether it is installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import pytest


class Anything(type):
    """The type of classes that have any attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torchvision and all its modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def stand_in_for_torchvision() -> Iterator[None]:
    """Inside, torchvision can be imported; afterwards it is not there, for others to find."""
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


@cache
def timm() -> Any:
    """The library; the test is skipped where it is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return pytest.importorskip("timm")
    with stand_in_for_torchvision():
        return pytest.importorskip("timm", reason="pip install --no-deps timm")
