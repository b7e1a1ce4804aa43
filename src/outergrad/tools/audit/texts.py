"""Texts beside what came back of them, position by position."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import torch
from torch import Tensor

NONE = -1
"""Stands where nothing came back."""


def paired(
    truth_TP: Tensor, found_FP: Tensor, most: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Returns true texts, each with the one of the found texts that is most like it.

    Those of which most came back are first. A found text stands beside one true text alone; for a
    text of which nothing is left the second is all `NONE`.

    Args:
        truth_TP: Ids, (texts, positions).
        found_FP: Ids, (found texts, positions); may have no text.
        most: Number of texts; None for all.
    """
    left = [*found_FP]
    equal_TF = (truth_TP[:, None] == found_FP[None]).sum(dim=2)
    best_T = equal_TF.max(dim=1).values if len(found_FP) else torch.zeros(len(truth_TP))
    pairs: list[tuple[Tensor, Tensor]] = []
    for truth_P in truth_TP[best_T.argsort(descending=True, stable=True)][:most]:
        alike = [int((one == truth_P).sum()) for one in left]
        if alike and max(alike) > 0:
            back_P = left.pop(alike.index(max(alike)))
        else:
            back_P = torch.full_like(truth_P, NONE)
        pairs.append((truth_P, back_P))
    return pairs


def text_pair(truth_P: Tensor, back_P: Tensor) -> str:
    """Returns HTML: two lines of ids, those that are wrong marked, for eyes and for readers."""
    true, back = truth_P.tolist(), back_P.tolist()
    right = sum(a == b for a, b in zip(true, back, strict=True))
    lines = (
        ("true", "".join(f"<td>{one}</td>" for one in true)),
        ("back", "".join(_cells(true, back))),
    )
    rows = "".join(f"<tr><th scope=row>{name}</th>{cells}</tr>" for name, cells in lines)
    told = escape(f"{right} of {len(true)} positions")
    return (
        f'<figure class="text"><figcaption>{told}</figcaption>'
        f'<div class="wide"><table>{rows}</table></div></figure>'
    )


def _cells(true: list[int], back: list[int]) -> Iterator[str]:
    for expected, one in zip(true, back, strict=True):
        shown = "\N{MIDDLE DOT}" if one == NONE else str(one)
        mark = "" if one == expected else ' class="wrong"'
        yield f"<td{mark}>{shown if not mark else f'<mark>{shown}</mark>'}</td>"
