"""Gradient write guard: detects writes of others to a gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class Seals:
    """Gradients as they were left in some parameters.

    Args:
        params: the parameters, by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self._seals: dict[str, tuple[TensorWeakRef, int, Tensor]] = {}
        self._altered: list[Tensor] = []

    def seal(self, names: Collection[str]) -> None:
        """Records these gradients as they are now."""
        for name in names:
            gradient = self.params[name].grad
            assert gradient is not None
            self._seals[name] = TensorWeakRef(gradient), gradient._version, _sums(gradient)

    def hold(self, names: Collection[str]) -> bool:
        """True if these gradients are as recorded, as far as can be told without waiting."""
        return all(self._is_as_left(name) for name in names)

    def intact(self) -> bool:
        """True if all gradients are as recorded; waits for the device."""
        return self.hold(self.params) and not any(map(bool, self._altered))

    def _is_as_left(self, name: str) -> bool:
        """True if the gradient is the same tensor, in the same version.

        The version does not count writes through `.data`, by numpy or by `GradScaler.unscale_`. So
        sums are compared, too, without waiting for the device.
        """
        gradient, seal = self.params[name].grad, self._seals.get(name)
        if gradient is None or seal is None:
            return gradient is None and seal is None
        left, version, sums = seal
        if left() is not gradient or gradient._version != version:
            return False
        self._altered.append((_sums(gradient) != sums).any())
        return True


@torch.no_grad()
def _sums(gradient: Tensor) -> Tensor:
    """Returns numbers that change with a gradient: its sum, and its norm in case that is zero."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.stack([gradient.sum(dtype=dtype), torch.linalg.vector_norm(gradient, dtype=dtype)])
