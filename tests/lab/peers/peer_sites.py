"""Sites of one small model that a peer trains, and the bytes of what they send."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import formulas
import torch
from formulas import network, pull
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ranks import run_on_lasting_groups

NUMEL = {name: p.numel() for name, p in network().named_parameters()}
MATRICES = ["1.weight", "3.weight"]
"""Of the network, those that are no embedding, no head and no kernel."""
HIDDEN = [*MATRICES, "5.weight"]
"""These and the kernel that does not read the input."""
adamw = partial(AdamW, lr=0.05)
sgd = partial(SGD, lr=0.1)


@dataclass
class Site:
    """A model, its peer and its optimizer."""

    rank: int
    model: nn.Module
    peer: Any
    optimizer: Optimizer

    def steps(self, count: int) -> Site:
        for _ in range(count):
            for name, p in self.model.named_parameters():
                p.grad = pull(self.rank, name, p.detach())
            self.optimizer.step()
        return self

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def site(settings: Any, optimizer: Callable[..., Optimizer], rank: int, group: Any) -> Site:
    model = network()
    peer = settings.peer(model, group)
    return Site(rank, model, peer, optimizer(list(model.parameters())))


def trained(settings: Any, optimizer: Callable[..., Optimizer], sites: int, steps: int):
    """The weights of every site, its peer and what it counted."""

    def body(rank, group):
        own = site(settings, optimizer, rank, group).steps(steps)
        own.peer.flush()
        own.peer.detach()
        return own

    return run_on_lasting_groups(sites, body)


def agree(found: list[Site], expected: list[formulas.Weights]) -> None:
    for own, wanted in zip(found, expected, strict=True):
        for name, w in own.weights.items():
            torch.testing.assert_close(w, wanted[name].detach(), rtol=1e-9, atol=1e-11)


def first_rights(
    settings: Any, names: list[str] | None = None, kind: str = "right"
) -> dict[str, torch.Tensor]:
    """The first Q, as one site draws it."""

    def body(rank, group):
        peer = settings.peer(network(), group)
        peer.detach()
        return {name: q.clone() for name, q in peer.memory[kind].items()}

    (found,) = run_on_lasting_groups(1, body)
    assert names is None or list(found) == names
    return found


# -- bytes ---------------------------------------------------------------------------------------


def kept(side: int, entries: int, names: Iterable[str] = NUMEL) -> dict[str, tuple[int, int]]:
    """By parameter: entries that are kept in all chunks, and entries of a chunk."""
    found = {}
    for name, p in ((n, p) for n, p in network().named_parameters() if n in names):
        matrix = formulas.as_matrix(p)
        chunks = [matrix[at].size for at in formulas.blocks(matrix, side)]
        found[name] = sum(min(entries, size) for size in chunks), chunks[0]
    return found


def packed(side: int, entries: int, bits: int, names: Iterable[str] = NUMEL) -> int:
    """Bytes of a message, values of float64."""
    total = 0
    for count, size in kept(side, entries, names).values():
        places = -(-count * (size - 1).bit_length() // 8)
        total += places + {2: -(-count // 4) + 8, 8: count + 4, 32: 8 * count}[bits]
    return total


def summed(numbers: int, sites: int) -> int:
    """Bytes that a site sends to all-reduce float64 numbers in a ring."""
    return 2 * (sites - 1) * 8 * numbers // sites


def low_rank(names: list[str], rank: int) -> tuple[int, int, int]:
    """Numbers of all P and of all Q, and of what is no such matrix."""
    shapes = {n: p.flatten(1).shape for n, p in network().named_parameters() if n in names}
    rest = sum(count for name, count in NUMEL.items() if name not in names)
    left, right = (rank * sum(side) for side in zip(*shapes.values(), strict=True))
    return left, right, rest


def binned_bytes(numel: int, bits: int, sites: int) -> int:
    """Bytes that a site sends of a tensor, whose pieces all take as many."""
    (piece,) = {-(-numel // sites) * bits + 7 >> 3, numel // sites * bits + 7 >> 3}
    return 2 * (sites - 1) * (4 * 2**bits + piece)
