"""Bags of embeddings: the gradient of a bag is a bag.

A row of the table is added to the bags that look it up, each time by a share: so its delta is the
sum of the deltas of these bags, by the same shares. Letters: N looked-up ids, B bags, R distinct
ids, O the width of the table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.transform import SampleRows, Samples
from outergrad.core.types import Call, Factors, Slot
from outergrad.layers._common import input_of
from outergrad.layers.embedding import distinct, objection_to_lookup, table_slot
from outergrad.linalg.outer import widened
from outergrad.linalg.site_gradient import sample_of_rows


class EmbeddingBagRule:
    """`nn.EmbeddingBag` of sums or means; each distinct id is sent with the sum of its deltas."""

    owns: tuple[str, ...] = ()
    traceable: bool = True

    def objection(self, module: nn.EmbeddingBag) -> str | None:
        """Returns an objection to maxima, whose ids differ by column, and to what tables refuse."""
        objection = objection_to_lookup(module)
        return 'mode="max"' if module.mode == "max" else objection

    def slots(self, module: nn.EmbeddingBag, name: str) -> list[Slot]:
        """Returns one lookup slot."""
        return [table_slot(module, name)]

    def forward(
        self,
        module: nn.EmbeddingBag,
        tap: TapFn,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Computes the module's forward through a tap."""
        y_BO = F.embedding_bag(
            input,
            module.weight.detach(),
            offsets,
            mode=module.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )
        bags_N = _bags(input, offsets, len(y_BO))
        shares_N = _shares(module, input.flatten(), bags_N, per_sample_weights, len(y_BO))
        looked_up = _LookedUp(input.flatten(), bags_N, shares_N).together()
        if torch.compiler.is_dynamo_compiling():  # ids are counted when the graph runs
            return tap(y_BO, looked_up)
        return tap(y_BO, looked_up, rows=distinct(module, input), samples=len(y_BO))

    def rows(
        self, module: nn.EmbeddingBag, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Returns the number of distinct ids that have a gradient.

        From a graph comes what `forward` gave to the tap, which alone has floating-point numbers.
        """
        ids = input_of(args, kwargs)
        return [distinct(module, _LookedUp.of(ids).ids_N if ids.is_floating_point() else ids)]

    def factors(self, module: nn.EmbeddingBag, slot: int, call: Call) -> Factors:
        """Returns distinct ids (R,) and their summed deltas (1, R, O), summed in one bag each."""
        ids_N, bags_N, shares_N = _LookedUp.of(call.a).without(module.padding_idx)
        sorted_N, order_N = ids_N.sort(stable=True)
        ids_R, counts_R = torch.unique_consecutive(sorted_N, return_counts=True)
        wide_BO = widened(call.d)
        sums_RO = F.embedding_bag(
            bags_N[order_N],
            wide_BO,
            counts_R.cumsum(0) - counts_R,
            mode="sum",
            per_sample_weights=shares_N[order_N].to(wide_BO.dtype),
        )
        return Factors(sums_RO.to(call.d.dtype).unsqueeze(0), ids_R)

    def by_sample(
        self, module: nn.EmbeddingBag, slot: int, call: Call, samples: Samples
    ) -> SampleRows:
        """Returns every looked-up id with its own delta; equal ids are not summed."""
        ids_N, bags_N, shares_N = _LookedUp.of(call.a).without(module.padding_idx)
        samples_B = sample_of_rows(samples, len(call.d), ids_N.device)
        d_NO = (widened(call.d)[bags_N] * shares_N[:, None]).to(call.d.dtype)
        return SampleRows(Factors(d_NO.unsqueeze(0), ids_N), samples_B[bags_N])


class _LookedUp(NamedTuple):
    """By looked-up id the bag that it is in, and the share by which it counts there."""

    ids_N: Tensor
    bags_N: Tensor
    shares_N: Tensor

    def together(self) -> Tensor:
        """Returns all three in one tensor, (3, N), for the tap; float64 holds ids as they are."""
        return torch.stack([part.detach().double() for part in self])

    @staticmethod
    def of(together: Tensor) -> _LookedUp:
        """The inverse of `together`."""
        ids_N, bags_N, shares_N = together
        return _LookedUp(ids_N.long(), bags_N.long(), shares_N)

    def without(self, padding: int | None) -> _LookedUp:
        """Leaves the padding out."""
        seen_N = _seen(self.ids_N, padding)
        return _LookedUp(*(part[seen_N] for part in self))


def _seen(ids_N: Tensor, padding: int | None) -> Tensor:
    """True for each id that is no padding; no id is negative."""
    return ids_N != (-1 if padding is None else padding)


def _bags(ids: Tensor, offsets: Tensor | None, bags: int) -> Tensor:
    """Returns the bag of each id, (N,)."""
    if offsets is None:
        return torch.arange(bags, device=ids.device).repeat_interleave(ids.shape[-1])
    places_N = torch.arange(len(ids), device=ids.device)
    return torch.bucketize(places_N, offsets[:bags].long(), right=True) - 1


def _shares(
    module: nn.EmbeddingBag, ids_N: Tensor, bags_N: Tensor, weights: Tensor | None, bags: int
) -> Tensor:
    """Returns the number by which each id's row is multiplied, (N,), float64."""
    if weights is not None:
        return weights.flatten().double()
    counts_N = _seen(ids_N, module.padding_idx).double()
    if module.mode == "sum":
        return counts_N
    return 1 / counts_N.new_zeros(bags).index_add(0, bags_N, counts_N).clamp_min(1)[bags_N]
