"""Whether somebody else wrote to a gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class Seals:
    """How the gradients of some parameters were left.

    Args:
        params: by name.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params
        self._seals: dict[str, tuple[TensorWeakRef, int, Tensor]] = {}
        self._altered: list[Tensor] = []

    def seal(self, names: Collection[str]) -> None:
        """These gradients are left as they are now."""
        for name in names:
            gradient = self.params[name].grad
            assert gradient is not None
            self._seals[name] = TensorWeakRef(gradient), gradient._version, _sums(gradient)

    def hold(self, names: Collection[str]) -> bool:
        """Whether these gradients are as they were left, as far as can be told at once."""
        return all(self._is_as_left(name) for name in names)

    def intact(self) -> bool:
        """Whether all gradients are as they were left; waits for the device."""
        return self.hold(self.params) and not any(map(bool, self._altered))

    def _is_as_left(self, name: str) -> bool:
        """Whether it is the same tensor, in the same version.

        That does not count what is written through `.data`, by numpy or by
        `GradScaler.unscale_`, so its sums are compared, too, without waiting for the device.
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
    """Numbers that change with a gradient: its sum, and its norm for when that is zero."""
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return torch.stack([gradient.sum(dtype=dtype), torch.linalg.vector_norm(gradient, dtype=dtype)])
