"""Multi-head attention: its projections are linear layers that no module hook can see."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outergrad.core.protocols import TapFn
from outergrad.core.types import Slot
from outergrad.layers._common import (
    LinearProducts,
    detached,
    join,
    matrix_slot,
    tapped_linear,
)

_PACKED = {"q": (0, 1), "k": (1, 2), "v": (2, 3), "kv": (1, 3), "qkv": (0, 3)}
"""Range of the packed projection that each slot covers, in thirds."""


class _Projection(NamedTuple):
    slot: int
    x: Tensor
    weight: Tensor
    bias: Tensor | None


class MultiheadAttentionRule(LinearProducts):
    """`nn.MultiheadAttention`: one slot per combination of projections, and one for the output.

    Inputs that are the same tensor are projected together, so that their rows are sent once:
    self-attention uses the slot "qkv", attention to a memory "q" and "kv".
    """

    owns: tuple[str, ...] = ("out_proj",)

    def slots(self, module: nn.MultiheadAttention, name: str) -> list[Slot]:
        """Returns q, k, v; if these share one weight, also kv and qkv; last the output."""
        packed = module.in_proj_weight is not None
        inner = [_in_slot(module, name, part) for part in (_PACKED if packed else "qkv")]
        last = matrix_slot(module.out_proj, join(name, "out_proj"))
        return [*inner, last._replace(layer=name)]

    def forward(
        self,
        module: nn.MultiheadAttention,
        tap: TapFn,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the module's forward; is_causal is a hint, only attn_mask is applied."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: pass the mask, too")
        q_BLE, k_BSE, v_BSE = _batch_first(module, *_project(module, tap, query, key, value))
        mask = _mask(module, q_BLE, k_BSE, attn_mask, key_padding_mask)
        k_BSE, v_BSE, mask = _append(module, k_BSE, v_BSE, mask)
        heads = (_heads(module, t) for t in (q_BLE, k_BSE, v_BSE))
        y_BHLD, weights_BHLS = _attend(module, *heads, mask=mask, need_weights=need_weights)
        # The module's own memory layout, so that a dropout that follows draws the same numbers.
        y_LBE = y_BHLD.permute(2, 0, 1, 3).flatten(2)
        out = module.out_proj
        about = {"samples": y_LBE.shape[1], "positions_first": True}
        y = tapped_linear(tap, y_LBE, out.weight, out.bias, slot=-1, **about)
        batched = query.dim() == 3
        y = y.squeeze(1) if not batched else y.transpose(0, 1) if module.batch_first else y
        if weights_BHLS is None:
            return y, None
        weights = weights_BHLS.mean(dim=1) if average_attn_weights else weights_BHLS
        return y, weights if batched else weights.squeeze(0)

    def rows(
        self, module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[int]:
        """Returns the positions of the inputs for the slots that `forward` would use, else 0."""
        inputs = [*args[:3], *(kwargs[n] for n in ("query", "key", "value")[len(args) :])]
        rows = [0] * len(self.slots(module, ""))
        for part in _parts(module, *inputs):
            rows[part.slot] = part.x.numel() // part.x.shape[-1]
        rows[-1] = inputs[0].numel() // module.embed_dim
        return rows


def _in_slot(module: nn.MultiheadAttention, name: str, part: str) -> Slot:
    start, stop = (third * module.embed_dim for third in _PACKED[part])
    packed = module.in_proj_weight is not None
    weight = "in_proj_weight" if packed else f"{part}_proj_weight"
    whole = matrix_slot(module, name, weight, "in_proj_bias")
    bias_rows = None if whole.bias is None else (start, stop)
    weight_rows = (start, stop) if packed else None
    return whole._replace(outputs=stop - start, weight_rows=weight_rows, bias_rows=bias_rows)


def _parts(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> list[_Projection]:
    """Returns the projections to compute; the same input of a packed weight is projected once."""
    inputs, packed = {"q": query, "k": key, "v": value}, module.in_proj_weight
    if packed is not None and key is value:
        inputs = {"qkv": query} if query is key else {"q": query, "kv": key}
    parts: list[_Projection] = []
    for name, x in inputs.items():
        third = slice(*(t * module.embed_dim for t in _PACKED[name]))
        bias = None if module.in_proj_bias is None else module.in_proj_bias[third]
        weight = getattr(module, f"{name}_proj_weight") if packed is None else packed[third]
        parts.append(_Projection(list(_PACKED).index(name), x, weight, bias))
    return parts


def _project(
    module: nn.MultiheadAttention, tap: TapFn, query: Tensor, key: Tensor, value: Tensor
) -> list[Tensor]:
    """Returns q, k and v, each (..., E)."""
    parts, last = _parts(module, query, key, value), not module.batch_first
    samples = query.shape[int(last)] if query.dim() == 3 else 1
    about = {"samples": samples, "positions_first": last}
    projected = [
        tapped_linear(tap, p.x, p.weight, detached(p.bias), p.slot, **about) for p in parts
    ]
    return [third for y in projected for third in y.split(module.embed_dim, dim=-1)]


def _batch_first(module: nn.MultiheadAttention, *tensors: Tensor) -> list[Tensor]:
    """Returns (B, L, E) from the layouts that the module accepts; B = 1 for unbatched inputs."""
    if tensors[0].dim() == 2:
        return [t.unsqueeze(0) for t in tensors]
    return [t if module.batch_first else t.transpose(0, 1) for t in tensors]


def _heads(module: nn.MultiheadAttention, t_BLE: Tensor) -> Tensor:
    """Returns (B, heads, L, E / heads)."""
    return t_BLE.unflatten(2, (module.num_heads, -1)).transpose(1, 2)


def _mask(
    module: nn.MultiheadAttention,
    q_BLE: Tensor,
    k_BSE: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Returns the additive mask of the scores, broadcastable to (B, heads, L, S), or None."""
    (batch, targets), sources = q_BLE.shape[:2], k_BSE.shape[1]
    total = None
    if attn_mask is not None:
        full = (batch * module.num_heads, targets, sources)
        if attn_mask.shape not in (full, full[1:]):
            raise RuntimeError(f"attn_mask must be {full[1:]} or {full}, not {attn_mask.shape}")
        total = _additive(attn_mask, q_BLE.dtype)
        total = total.unflatten(0, (batch, -1)) if total.dim() == 3 else total[None, None]
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q_BLE.dtype).reshape(batch, 1, 1, sources)
        total = padding if total is None else total + padding
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask; True in a boolean one excludes a position."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


def _append(
    module: nn.MultiheadAttention, k_BSE: Tensor, v_BSE: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Appends the learnt (bias_k, bias_v) and the zero position that some modules have."""
    batch, _, width = k_BSE.shape
    zero = k_BSE.new_zeros(1, 1, width)
    extra = [(k, v) for k, v in [(module.bias_k, module.bias_v)] if k is not None and v is not None]
    extra += [(zero, zero)] if module.add_zero_attn else []
    for k, v in extra:
        k_BSE = torch.cat([k_BSE, k.to(k_BSE.dtype).expand(batch, 1, width)], dim=1)
        v_BSE = torch.cat([v_BSE, v.to(v_BSE.dtype).expand(batch, 1, width)], dim=1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    return k_BSE, v_BSE, mask


def _attend(
    module: nn.MultiheadAttention,
    q_BHLD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    mask: Tensor | None,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the attention's output and, if needed, its weights (after dropout, as the module)."""
    dropout = module.dropout if module.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(q_BHLD, k_BHSD, v_BHSD, mask, dropout), None
    scores = (q_BHLD * q_BHLD.shape[-1] ** -0.5) @ k_BHSD.mT
    scores = scores if mask is None else scores + mask
    weights_BHLS = F.dropout(scores.softmax(dim=-1), dropout)
    return weights_BHLS @ v_BHSD, weights_BHLS
