"""Energies of the triplets of all layers, as means over the last steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from outergrad.core.types import Place, StateDict, place_name

_NEAR = (1e-100, 1e100)
"""Range of singular values whose squares stay in the range of float64."""


class Energies:
    """Squared singular values of each layer, as means over the last steps.

    A step notes tensors, and all of them are read at once when it is applied. Values that are not
    finite are not noted.

    Args:
        steps: Number of steps of a mean.

    Attributes:
        means: Energies of each layer's triplets, in order, float64.
        steps: Number of steps that were applied.
    """

    def __init__(self, steps: int) -> None:
        self.means: dict[Place, np.ndarray] = {}
        self.steps = 0
        self._over = steps
        self._noted: dict[Place, Tensor] = {}
        self._unit: float | None = None
        """Unit of singular values that keeps their squares in range, from the first ones noted."""

    def note(self, place: Place, sigma_GR: Tensor) -> None:
        """Records the singular values of a layer in this step."""
        self._noted[place] = sigma_GR

    def commit(self, *, applied: bool) -> bool:
        """Ends a step, and adds what it noted to the means if it is applied.

        Returns:
            True if there was something to add.
        """
        noted, self._noted = self._noted, {}
        if not applied or not noted:
            return False
        self.steps += 1
        share = 1 / min(self.steps, self._over)
        for place, sigma_GR in _read(noted).items():
            if np.isfinite(sigma_GR).all():
                found = np.square(sigma_GR / self._unit_of(sigma_GR)).sum(axis=0)
                before = self.means.get(place)
                self.means[place] = found if before is None else _mean(before, found, share)
        return True

    def _unit_of(self, sigma_GR: np.ndarray) -> float:
        """Returns the unit, which the first values that are not zero decide."""
        if self._unit is None and (largest := float(sigma_GR.max(initial=0.0))):
            self._unit = 1.0 if _NEAR[0] < largest < _NEAR[1] else largest
        return self._unit or 1.0

    def state(self) -> StateDict:
        """Returns the means, by place, and the number of steps."""
        means = {place_name(place): found.tolist() for place, found in self.means.items()}
        return {"energies": means, "seen": self.steps}

    def load(self, own: StateDict, place_of: Mapping[str, Place]) -> None:
        """Continues from a saved state."""
        self.means = {place_of[name]: np.array(e) for name, e in own["energies"].items()}
        self.steps = own.get("seen", 0)


def _read(noted: Mapping[Place, Tensor]) -> dict[Place, np.ndarray]:
    """Returns all tensors in float64, by one copy from the device."""
    numbers = torch.cat([sigma_GR.flatten() for sigma_GR in noted.values()]).double().cpu().numpy()
    ends = np.cumsum([sigma_GR.numel() for sigma_GR in noted.values()])[:-1]
    parts = zip(noted.items(), np.split(numbers, ends), strict=True)
    return {place: part.reshape(sigma_GR.shape) for (place, sigma_GR), part in parts}


def _mean(before: np.ndarray, found: np.ndarray, share: float) -> np.ndarray:
    """Returns the mean with weight `share` for new values; unmatched values are kept."""
    both = min(len(before), len(found))
    mean = before[:both] + share * (found[:both] - before[:both])
    return np.concatenate([mean, found[both:], before[both:]])
