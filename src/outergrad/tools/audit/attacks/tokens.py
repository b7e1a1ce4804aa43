"""Tokens of a batch, read off the gradient of an embedding's table."""

from __future__ import annotations

from torch import Tensor

_ZERO = 1e-6
"""Norm of a row, as a share of the largest, up to which nobody looked it up."""


def looked_up(table_VW: Tensor) -> Tensor:
    """Returns the ids of the rows of a table that a batch looked up.

    Only these rows have a gradient. Where all rows have one (a head that shares the table, or
    noise), the table does not tell which were looked up, and nothing is claimed. Choose `text.py`
    then. Source: Melis et al., arXiv 1805.04049 (leakage from the embedding layer).

    Args:
        table_VW: Gradient of the table, (ids, width).

    Returns:
        Ids in ascending order, int64.
    """
    norms_V = table_VW.double().norm(dim=1)
    used_V = norms_V > _ZERO * norms_V.max()
    ids = used_V.nonzero().flatten()
    return ids[:0] if len(ids) == len(norms_V) else ids
