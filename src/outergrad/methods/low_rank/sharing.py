"""Division of a budget: bytes go where the next triplet has most energy per byte."""

from __future__ import annotations

import numpy as np


def shared_out(energies_LK: np.ndarray, costs_LK: np.ndarray, spare: float) -> np.ndarray:
    """Returns the number of further triplets of each layer, (L,).

    The result is that of giving one triplet after another to the layer whose next one has most
    energy per byte. A layer whose next triplet does not fit, or has no energy, gets no more.

    All triplets are sorted at once. A triplet's turn comes after those before it in its layer, so
    it counts as no more worth than these. Equal ones go to the first layer.

    Args:
        energies_LK: Energies of a layer's further triplets, in order; 0 where they are not known.
        costs_LK: Bytes of each of them.
        spare: Bytes to divide.
    """
    layers, width = energies_LK.shape
    worths_N = np.minimum.accumulate(energies_LK / np.maximum(costs_LK, 1), axis=1).ravel()
    order_N = np.argsort(-worths_N, kind="stable")
    order_N = order_N[worths_N[order_N] > 0]
    layers_N, costs_N = order_N // max(width, 1), costs_LK.ravel()[order_N]
    more_L = np.zeros(layers, dtype=np.int64)
    while len(costs_N):
        fitting = int(np.searchsorted(np.cumsum(costs_N), spare, side="right"))
        more_L += np.bincount(layers_N[:fitting], minlength=layers)
        spare -= costs_N[:fitting].sum()
        layers_N, costs_N = layers_N[fitting:], costs_N[fitting:]
        others = layers_N != (layers_N[0] if len(layers_N) else -1)
        layers_N, costs_N = layers_N[others], costs_N[others]
    return more_L
