"""A device that is not the CPU, on any machine: what waits for it, or mixes it up, is seen.

PyTorch lets Python be a backend. This one keeps the numbers in tensors of the CPU, so that all
values are right and gloo can carry them, but its tensors are of another device: autograd calls
their nodes in a thread of the device, as on CUDA, and an operation that is given tensors of both
devices raises. What stops the host until the device has come so far is noted with the place in
outergrad that asked for it. It can be registered once per process, before the first backward.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

import outergrad
from outergrad.capture import untappable

NAME = "other"
_SOURCE = Path(outergrad.__file__).parent
_aten = torch.ops.aten

_READS = {
    _aten._local_scalar_dense.default: "a number",
    _aten.is_nonzero.default: "a number",
    _aten.equal.default: "a number",
    _aten.allclose.default: "a number",
    _aten._linalg_check_errors.default: "whether a decomposition failed",
    _aten._linalg_eigh.default: "whether a decomposition failed",
    _aten._linalg_svd.default: "whether a decomposition failed",
    _aten.nonzero.default: "a length",
    _aten.masked_select.default: "a length",
    _aten._unique2.default: "a length",
    _aten.unique_consecutive.default: "a length",
    _aten.unique_dim.default: "a length",
    _aten.repeat_interleave.Tensor: "a length",
    _aten.bincount.default: "a length",
}
"""What stops the host on CUDA: by what it waits for."""
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_MAY_MIX = {*_COPIES, _aten.set_.source_Tensor}


class Seen:
    """What stopped the host, by place: `file.py:function` in outergrad, and what it waited for."""

    def __init__(self) -> None:
        self.waits: Counter[tuple[str, str]] = Counter()
        self.on = False

    def note(self, what: str) -> None:
        """Takes down the innermost function of outergrad that runs, if one does."""
        place = _place()
        if self.on and place is not None:
            self.waits[place, what] += 1


SEEN = Seen()


@contextmanager
def watching() -> Iterator[Counter[tuple[str, str]]]:
    """What stops the host in between."""
    SEEN.waits, SEEN.on = Counter(), True
    try:
        yield SEEN.waits
    finally:
        SEEN.on = False


def _place() -> str | None:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_SOURCE):
            return f"{path.relative_to(_SOURCE)}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return None


class Other(Tensor):
    """A tensor of the other device; `numbers` has its values."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Other:
        made = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=f"{NAME}:0",
        )
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(op, args, kwargs or {})

    def tolist(self) -> Any:
        """As of any device: its numbers are copied to the host."""
        return self.to("cpu").tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where its numbers are: tensors that share them can be told."""
        return self.numbers.untyped_storage()

    def __repr__(self) -> str:
        return f"Other({self.numbers!r})"


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation, on the numbers; what it returns is of the device that it should be of."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = {id(t.numbers): t for t in tensors if isinstance(t, Other)}
    _refuse_both(op, tensors)
    to = kwargs.get("device")
    there = bool(here) if to is None else torch.device(to).type == NAME
    _note(op, args, tensors, there=there)
    if to is not None and torch.device(to).type == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    found = op(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))

    def wrapped(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if id(t) in here:
            return here[id(t)]
        return Other(t) if there else t

    if op is _aten.copy_.default:
        return args[0]
    return tree_map(wrapped, found)


def _numbers(t: Any) -> Any:
    return t.numbers if isinstance(t, Other) else t


def _refuse_both(op: Any, tensors: list[Tensor]) -> None:
    """As CUDA does: a number of the CPU may meet its tensors, a tensor may not."""
    ours = any(isinstance(t, Other) for t in tensors)
    theirs = any(not isinstance(t, Other) and t.dim() > 0 for t in tensors)
    if ours and theirs and op not in _MAY_MIX:
        SEEN.note("tensors of two devices")
        raise RuntimeError(f"{op}: tensors of two devices, the CPU and {NAME}")


def _note(op: Any, args: tuple[Any, ...], tensors: list[Tensor], *, there: bool) -> None:
    on_device = any(isinstance(t, Other) for t in tensors)
    if op in _READS and on_device:
        SEEN.note(_READS[op])
    elif op is _aten.index.Tensor and _by_mask(args[1]) and on_device:
        SEEN.note("a length")
    elif op is _aten._to_copy.default and on_device and not there:
        SEEN.note("a copy to the host")
    elif op is _aten.copy_.default and isinstance(args[0], Other) != isinstance(args[1], Other):
        SEEN.note("a copy from the host" if isinstance(args[0], Other) else "a copy to the host")
    elif op is _aten._to_copy.default and not on_device and there:
        SEEN.note("a copy from the host")


def _by_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class _Module(backend_registration._DummyBackendModule):
    """What `torch.autocast` asks for."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> torch.device:
    """Makes the device known to PyTorch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    untappable._ORDINARY.add(Other)  # it stands for the plain tensor of a device
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")
    register.library = library  # type: ignore[attr-defined]  # as long as it lives
    return torch.device(f"{NAME}:0")
