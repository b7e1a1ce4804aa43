"""What embeddings send: rows by id."""

from __future__ import annotations

from outergrad._types import Factors


def without_silent_ids(factors: Factors) -> Factors:
    """Hides ids without a gradient: that they were looked up, the gradient does not say.

    Args:
        factors: d_GRO, (1, R, O), and the ids a_GRI, (R,).
    """
    silent = (factors.d_GRO[0] == 0).all(dim=1)
    return factors._replace(a_GRI=factors.a_GRI.masked_fill(silent, 0))
