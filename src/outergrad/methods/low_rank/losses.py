"""What the receivers do not get of rows that are encoded: remembered as what is not sent."""

from __future__ import annotations

from torch import Tensor

from outergrad.core.coding import Codecs, received
from outergrad.core.types import Factors, Gradient
from outergrad.linalg.outer import stack
from outergrad.linalg.small_core import small_core
from outergrad.methods.low_rank.memory import finite_or_none


def decoded(sent: Factors, codecs: Codecs) -> Factors:
    """The rows as they arrive."""
    return Factors(received(codecs, sent.d_GRO), received(codecs, sent.a_GRI))


def loss_of(sent: Factors, codecs: Codecs) -> Factors:
    """The product of what is sent, without that of what arrives: as factors of 2 R rows.

    As `(D - D') A' + D (A - A')` of deltas D and activations A that arrive as D' and A': nothing
    large cancels in its product.
    """
    d_GRO, a_GRI, _ = decoded(sent, codecs)
    of_deltas = Factors(sent.d_GRO - d_GRO, a_GRI)
    return stack([of_deltas, Factors(sent.d_GRO, sent.a_GRI - a_GRI)])


def with_loss(
    residual: Gradient | None, sent: Factors, codecs: Codecs, rank: int
) -> Gradient | None:
    """What is not sent, and what encoding loses of what is.

    Args:
        residual: a matrix, which is changed in place, or factors, or nothing.
        sent: the rows before they are encoded.
        codecs: what they go through.
        rank: how many triplets are kept of factors.
    """
    lost = loss_of(sent, codecs)
    if finite_or_none(lost) is None:
        return residual
    if isinstance(residual, Tensor):
        return residual.baddbmm_(lost.d_GRO.mT, lost.a_GRI)
    parts = [lost] if residual is None else [residual, lost]
    kept = small_core(stack(parts), rank)
    return kept.factors() if kept.rank else None
