"""Gaussian noise that nobody else can draw again."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 1 << 16
"""Numbers that are drawn together, so that they stay in the cache."""
_SMALL = 1 << 12
"""Numbers up to which a call costs more than a copy."""
_UNIT, _FINE = 2.0**-31, 2.0**-53


class Noise(Protocol):
    """Source of normal numbers, none of which it draws twice."""

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Returns independent numbers of mean 0 and variance 1, (count,), floating."""
        ...


def source(generator: torch.Generator | None, *, secure: bool) -> Noise:
    """Returns a new source.

    Args:
        generator: draws the numbers; None for the operating system.
        secure: whether also the rounding of the numbers must tell nothing.
    """
    if generator is not None:
        return Generated(generator)
    return Secure() if secure else Random()


def add(noise: Noise, t: Tensor, deviation: float) -> Tensor:
    """Adds noise of this standard deviation; in place, if t is contiguous."""
    flat_N = t.contiguous().view(-1)
    for part_N in flat_N.split(_AT_ONCE):
        part_N.add_(noise.draw(len(part_N), t.device).to(part_N), alpha=deviation)
    return flat_N.view(t.shape)


def add_to_all(noise: Noise, tensors: Sequence[Tensor], deviation: float) -> list[Tensor]:
    """Adds noise to tensors, as `add` does; to small ones of one type and device together."""
    found, together = list(tensors), dict[tuple[torch.dtype, torch.device], list[int]]()
    for k, t in enumerate(tensors):
        if t.numel() > _SMALL:
            found[k] = add(noise, t, deviation)
        else:
            together.setdefault((t.dtype, t.device), []).append(k)
    for places in together.values():
        some = [tensors[k] for k in places]
        all_N = add(noise, torch.cat([t.reshape(-1) for t in some]), deviation)
        parts = all_N.split([t.numel() for t in some])
        for k, t, part_N in zip(places, some, parts, strict=True):
            found[k] = part_N.view(t.shape)
    return found


class Generated:
    """Numbers of a generator of PyTorch: whoever knows its state knows them all."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Returns numbers in float32."""
        generator = self._generator
        return torch.randn(count, generator=generator, device=generator.device).to(device)


class Random:
    """Numbers from bits of a cryptographic generator, in float32, by Box and Muller.

    The bits are OpenSSL's, which the operating system seeds; PyTorch's generator for the CPU takes
    32 bits of a seed, so few that all can be tried. NumPy's functions of float32 take half the time
    of PyTorch's. On other devices numbers are PyTorch's, of a generator that the operating system
    seeds with 64 bits.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Returns numbers in float32, none longer than 6.7."""
        if device.type != "cpu":
            return torch.randn(count, generator=self._generator_of(device), device=device)
        pairs = -(-count // 2)
        bits = np.frombuffer(ssl.RAND_bytes(8 * pairs), dtype=np.int32)
        length, angle = bits.astype(np.float32).reshape(2, pairs)
        np.abs(length, out=length)
        length *= _UNIT
        length += _UNIT / 2
        np.log(length, out=length)
        length *= -2
        np.sqrt(length, out=length)
        angle *= math.pi * _UNIT
        numbers = np.empty((2, pairs), np.float32)
        np.sin(angle, out=numbers[0])
        np.cos(angle, out=numbers[1])
        numbers *= length
        return torch.from_numpy(numbers.reshape(-1)[:count])

    def _generator_of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            seed = int.from_bytes(os.urandom(8), "little", signed=True)
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


class Secure:
    """Numbers of which also the rounding tells nothing, in float64.

    Each is half the sum of four by Box and Muller from bits of a cryptographic generator: which of
    the floating-point numbers around it such a sum is does not tell which bits it was made of.
    Source: Holohan and Braghin, "Secure Random Sampling in Differential Privacy", arXiv 2107.10138.
    """

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Returns numbers in float64; of each pair one goes into one sum, one into another."""
        pairs = -(-count // 2)
        bits = np.frombuffer(ssl.RAND_bytes(8 * 8 * pairs), dtype=np.uint64)
        uniform = torch.from_numpy((bits >> 11) * _FINE).view(2, 4, pairs)
        length_4N = (-2 * torch.log(uniform[0] + _FINE)).sqrt()
        angle_4N = 2 * math.pi * uniform[1]
        both = torch.cat([length_4N * angle_4N.cos(), length_4N * angle_4N.sin()], dim=1)
        return (both.sum(dim=0) / 2)[:count].to(device)
