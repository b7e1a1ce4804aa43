"""Embeddings: the factors of a table's gradient are the looked-up ids and their summed deltas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.capture.copies import Copies, copied
from outergrad.core.protocols import TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import input_of, is_given, join, layer_of, samples_of
from outergrad.linalg.outer import coalesce
from outergrad.linalg.site_gradient import sample_of_rows

MAX_NORM_REFUSED = (
    "max_norm changes the table in forward, by each site's own batch, so the sites "
    "would drift apart; set max_norm=None and normalise after optimizer.step()"
)
SPARSE_REFUSED = "sparse=True is not supported; set sparse=False"


class EmbeddingRule:
    """`nn.Embedding`; each distinct id is sent with the sum of its deltas."""

    owns: tuple[str, ...] = ()
    traceable: bool = True

    def objection(self, module: nn.Embedding) -> str | None:
        """Returns an objection to what `objection_to_lookup` objects to."""
        return objection_to_lookup(module)

    def slots(self, module: nn.Embedding, name: str) -> list[Slot]:
        """Returns one lookup slot."""
        return [table_slot(module, name)]

    def forward(self, module: nn.Embedding, tap: TapFn, input: Tensor) -> Tensor:
        """Computes the module's forward through a tap.

        Where samples are told apart, ids that all of them share, as those of positions, are looked
        up once for each.

        Raises:
            RuntimeError: the ids may be those of samples or of positions.
        """
        y = F.embedding(input, module.weight.detach(), module.padding_idx)
        if torch.compiler.is_dynamo_compiling():  # ids are counted when the graph runs
            return tap(y, input)
        samples, total = input.shape[0] if input.dim() else 1, samples_of(tap)
        if total is None or (samples == total and not _may_be_shared(tap, input)):
            return tap(y, input, rows=distinct(module, input), samples=samples)
        y_B = tap(copied(y, total), input, rows=distinct(module, input), samples=total)
        return Copies(y_B, join(layer_of(tap), "weight"))

    def rows(
        self, module: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Returns the number of distinct ids that have a gradient."""
        return [distinct(module, input_of(args, kwargs))]

    def factors(self, module: nn.Embedding, slot: int, call: Call) -> Factors:
        """Returns distinct ids (R,) and their summed deltas (1, R, O)."""
        ids_N, d_NO = _looked_up(call)
        if module.padding_idx is not None:
            seen = ids_N != module.padding_idx
            ids_N, d_NO = ids_N[seen], d_NO[seen]
        ids_R, d_RO = coalesce(ids_N.long(), d_NO)
        return Factors(d_RO.unsqueeze(0), ids_R)

    def by_sample(
        self, module: nn.Embedding, slot: int, call: Call, samples: Samples
    ) -> SampleRows:
        """Returns every looked-up id with its own delta; equal ids are not summed."""
        ids_N, d_NO = _looked_up(call)
        samples_N = sample_of_rows(samples, len(ids_N), ids_N.device)
        if module.padding_idx is not None:
            seen = ids_N != module.padding_idx
            ids_N, d_NO, samples_N = ids_N[seen], d_NO[seen], samples_N[seen]
        return SampleRows(Factors(d_NO.unsqueeze(0), ids_N.long()), samples_N)


def _looked_up(call: Call) -> tuple[Tensor, Tensor]:
    """Returns ids (N,) and deltas (N, O); ids that all samples share come once for each."""
    return call.a.expand(call.d.shape[:-1]).flatten(), call.d.reshape(-1, call.d.shape[-1])


def _may_be_shared(tap: TapFn, ids: Tensor) -> bool:
    """True if as many ids as samples may be positions; `Copies` is right for both.

    Raises:
        RuntimeError: a square of ids was computed, as positions relative to each other are.
    """
    total = len(ids) if ids.dim() else 1
    if total > 1 and ids.shape[:2] == (total, total) and not is_given(tap, ids):
        raise RuntimeError(
            f"{layer_of(tap)!r} is called with {total} x {total} ids, and the model with {total} "
            f"samples: whether the first dimension counts samples or positions is not known, and "
            f"the transform needs the gradient of each sample: use another batch size"
        )
    places = torch.arange(total, dtype=ids.dtype, device=ids.device)
    return total > 1 and ids.dim() == 1 and ids.equal(places)


def objection_to_lookup(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    """Returns an objection to scale_grad_by_freq, which divides by counts of the whole batch.

    Raises:
        ValueError: for max_norm, which rewrites the table from each site's own batch, and for
            sparse gradients, which cannot be added to those of other sites in place.
    """
    if module.max_norm is not None:
        raise ValueError(MAX_NORM_REFUSED)
    if module.sparse:
        raise ValueError(f"{SPARSE_REFUSED} (og.DAD still sends only the rows that were looked up)")
    return "scale_grad_by_freq" if module.scale_grad_by_freq else None


def table_slot(module: nn.Embedding | nn.EmbeddingBag, name: str) -> Slot:
    """Returns the slot of a table; O is its width, I its number of rows."""
    inputs, outputs = module.weight.shape
    return Slot(name, join(name, "weight"), outputs, inputs, lookup=True)


def distinct(module: nn.Embedding | nn.EmbeddingBag, ids: Tensor) -> int:
    """Returns the number of rows to be sent, known before the delta: distinct ids, not padding."""
    found = torch.unique(ids)
    return len(found) - int(module.padding_idx is not None and module.padding_idx in found)
