"""Rows of data, computed back from what a ReLU behind the first layer lets through."""

from __future__ import annotations

import torch
from torch import Tensor

_AGREEING = 1e-3
"""Relative error of the hidden row, computed again, up to which a row is right."""


def rows_behind(
    hidden_NO: Tensor, weight_OI: Tensor, bias_O: Tensor, basis_RI: Tensor | None = None
) -> Tensor:
    """Returns rows of data from the activations of the first hidden layer.

    Units that a ReLU has let through are linear in the row: `h = W x + b`. With as many of them as
    inputs they give x. With fewer, x may be looked for in the span of the gradient of the same
    layer, which has no more directions than the batch has rows. Each row is computed forth again,
    and returned if it gives the same activations.

    Choose it where activations travel (`og.EDAD`, `reveal="activations"` behind a layer that does
    not).

    Args:
        hidden_NO: Activations behind the ReLU, (rows, outputs).
        weight_OI: Weight of the first layer.
        bias_O: Its bias.
        basis_RI: Directions that the rows are combinations of; None for all.

    Returns:
        Rows in float64, (found, inputs).
    """
    weight_OI, bias_O, hidden_NO = weight_OI.double(), bias_O.double(), hidden_NO.double()
    if basis_RI is None:
        basis_RI = torch.eye(weight_OI.shape[1], dtype=torch.float64)
    found = []
    for hidden_O in hidden_NO:
        on_O = hidden_O > 0
        if int(on_O.sum()) < len(basis_RI):
            continue
        seen_UR = weight_OI[on_O] @ basis_RI.T
        known_U1 = (hidden_O - bias_O)[on_O, None]
        row_I = torch.linalg.lstsq(seen_UR, known_U1).solution[:, 0] @ basis_RI
        again_O = torch.relu(weight_OI @ row_I + bias_O)
        if float((again_O - hidden_O).norm()) <= _AGREEING * float(hidden_O.norm()):
            found.append(row_I)
    return torch.stack(found) if found else weight_OI[:0]
