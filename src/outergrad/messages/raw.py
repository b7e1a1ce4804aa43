"""Conversion between tensors and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_CHUNK_BYTES = 1 << 26


ORDINARY = {Tensor, nn.Parameter}
"""Tensor types without a meaning of their own."""
_USUAL_DISPATCH = getattr(Tensor, "__torch_dispatch__")  # noqa: B009  # pyright would bind it


def annotates(kind: type) -> bool:
    """True if PyTorch computes with this type: it has no `__torch_dispatch__` of its own."""
    return getattr(kind, "__torch_dispatch__", None) is _USUAL_DISPATCH


def has_elements(t: Tensor) -> bool:
    """True if a tensor is an array of elements, which can be sent and overwritten.

    Sparse, nested and quantized tensors are not, nor those of oneDNN and of most subclasses.
    """
    kind = type(t)
    if not (kind in ORDINARY or annotates(kind) or kind.__name__ == "DTensor"):
        return False
    return t.layout == torch.strided and not (t.is_nested or t.is_quantized)


def parts_of(t: Tensor) -> list[Tensor]:
    """Returns the tensors with elements that a tensor is composed of.

    Raises:
        TypeError: its components cannot be determined.
    """
    if has_elements(t):
        return [t]
    if hasattr(t, "__tensor_flatten__"):
        inner = [getattr(t, name) for name in t.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    elif t.is_nested:
        inner = list(t.unbind())
    elif t.is_quantized:
        inner = [t.int_repr(), t.dequantize()]
    elif t.layout == torch.sparse_coo:
        t = t.coalesce()
        inner = [t.indices(), t.values()]
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        inner = [t.crow_indices(), t.col_indices(), t.values()]
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        inner = [t.ccol_indices(), t.row_indices(), t.values()]
    elif t.is_mkldnn:
        inner = [t.to_dense()]
    else:
        raise TypeError(f"{type(t).__name__} has no __tensor_flatten__")
    return [part for one in inner for part in parts_of(one)]


def resolved(t: Tensor) -> Tensor:
    """Returns the tensor without lazy conjugation or negation: such views are computed."""
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def overwrite(t: Tensor, value: Tensor) -> None:
    """Copies values into a tensor, also into one that was made in inference mode."""
    if t.is_inference():
        with torch.inference_mode():
            t.copy_(value)
    else:
        t.copy_(value)


def raw(t: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements, in their order."""
    return resolved(t).detach().contiguous().view(-1).view(torch.uint8)


def content(t: Tensor) -> bytes:
    """Returns a copy of a tensor's bytes, which the tensor may outlive or change under."""
    t = raw(t)
    if t.is_cuda:  # by way of pinned memory, to which a device copies faster
        t = torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t)
    return t.cpu().numpy().tobytes()


def from_raw(part: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The inverse of `raw`."""
    return part.clone().view(dtype).view(shape)  # clone: memory that is aligned for any dtype


def as_tensor(content: bytes) -> Tensor:
    """Copies bytes into a uint8 tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def digest(content: bytes, tensors: Iterable[Tensor] = ()) -> int:
    """62 bits of the SHA-256 of all bytes, so that the result is an int64."""
    found = hashlib.sha256(content)
    for t in tensors:
        found.update(raw(t).cpu().numpy().data)
    return int.from_bytes(found.digest()[:8], "big") >> 2


def in_chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Groups tensors into messages of bounded size."""
    chunks: list[list[Tensor]] = []
    left = 0
    for t in tensors:
        if left <= 0:
            chunks.append([])
            left = _CHUNK_BYTES
        chunks[-1].append(t)
        left -= t.nbytes
    return chunks
