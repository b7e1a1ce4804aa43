"""Push-sum: a site gives away shares of its weights, and of a mass by which these count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outergrad.core.coding import Wire
from outergrad.core.types import StateDict
from outergrad.gossip.content import bytes_of, nbytes_of, plain_of, tensors_of
from outergrad.gossip.ends import Memory, Whole, require_gamma
from outergrad.gossip.reductions import Reduction, reduction_of, seed_of
from outergrad.linalg.finite import is_finite
from outergrad.wire import Plain

LEAST_MASS = 1 / 8
"""A site gives nothing that would leave it less: its own steps count 1 / mass times as much."""
_ABOUT = Plain((3,), torch.float64)
"""Of a letter: the mass of its sender, its step, and whether all of x is told."""


@dataclass(frozen=True, kw_only=True)
class SparsePush:
    """Sites push few bytes of their weights along directed edges, and what is left out later.

    Choose it where links go one way, are lost, or change from step to step, and few bytes count.
    Between two sites that can answer each other `og.gossip.PowerGossip` needs no tuning. `gamma`
    has to be searched for, and is the smaller the less is sent. Where each site has other classes
    than the others it learns far less than whole weights do (docs/gossip.md).

    Of x a site tells c = Q(x + e), where e := x + e - c is what it has left out so far. Each
    receiver j takes gamma p_ij c and as large a share of the mass w, whole, and the sender loses
    the same. So the sums of x and w over all sites, and what is on its way, stay as they are. Here
    x is the change since the start, the same by linearity: what has not changed need not travel.
    Source: Aketi, Singh and Rabaey, "Sparse-Push: Communication- & Energy-Efficient Decentralized
    Distributed Learning over Directed & Time-Varying Graphs with non-IID Datasets", arXiv
    2102.05715.

    Attributes:
        reduce: Q: a codec, as `og.wire.TopK(0.01)` or `og.wire.Sign()`, `og.gossip.RandomK(...)`
            or `og.gossip.LowRank(...)`.
        gamma: Share of what is told that moves, above 0 and up to 1. Too large a one diverges.
        seed: Seed of random choices. All sites choose the same in the same step.
    """

    reduce: Reduction | Wire
    gamma: float
    seed: int = 0
    reads_start = False

    def __post_init__(self) -> None:
        require_gamma(self, 1)
        object.__setattr__(self, "reduce", reduction_of(self.reduce, "SparsePush"))

    def travels(self, t: Tensor) -> str:
        """Returns "compressed"."""
        return "compressed"


class PushSum:
    """A site's part of a sum over all sites: x and its mass w, of which it shows origin + x / w.

    Steps of the user's optimizers are added to x, and not to x / w. So the mean over all sites,
    the origin plus the sum of x by that of w, moves by each site's own steps alike, whatever share
    of the mass it has. Source: Assran et al., "Stochastic Gradient Push for Distributed Deep
    Learning", arXiv 1811.10792, algorithm 1.

    Args:
        shown: the weights, which optimizers change, the same at all sites.
        method: says what is told of x.

    Attributes:
        x: the site's part, without the mass.
        mass: w.
    """

    def __init__(self, shown: Sequence[Tensor], method: Whole | SparsePush) -> None:
        self._params, self._method = shown, method
        self._plain, self._device = plain_of(shown), shown[0].device
        self.begin()

    @property
    def most_bytes(self) -> int:
        """Largest content of a letter."""
        return nbytes_of([_ABOUT]) + max(nbytes_of(self._plain), nbytes_of(self._own.sent))

    def begin(self) -> None:
        """Takes the weights that are shown as those of all sites, with a mass of 1."""
        if isinstance(self._method, SparsePush):
            self._own = _Reduced(self._method, self._shown)
        else:
            self._own = _All(self._shown)
        self.x = [p - t for p, t in zip(self._shown, self._own.origin, strict=True)]
        self.mass = 1.0

    @property
    def _shown(self) -> list[Tensor]:
        """The weights of now, which may lie elsewhere than before: `model.to` moves them."""
        return [p.detach() for p in self._params]

    def take_steps(self) -> None:
        """Adds to x what the user's optimizers have changed in the weights."""
        for p, x, z in zip(self._shown, self.x, self._weights(), strict=True):
            x.add_(p - z)

    def show(self) -> None:
        """Makes the weights those of now."""
        for p, z in zip(self._shown, self._weights(), strict=True):
            p.copy_(z)

    def _weights(self) -> list[Tensor]:
        return [t + x / self.mass for t, x in zip(self._own.origin, self.x, strict=True)]

    def give(self, receivers: int, share: float, step: int, *, whole: bool = False) -> Tensor:
        """Gives to some receivers; returns the content of the letter to each of them.

        A site that would keep less than `LEAST_MASS`, or whose weights are not finite, gives
        nothing, and its letter says so.

        Args:
            receivers: their number.
            share: of x and of the mass, to each.
            step: of the graph.
            whole: whether all of x travels, whatever the method is.
        """
        about = bytes_of([torch.tensor([self.mass, step, whole], dtype=_ABOUT.dtype)])
        if self.mass * (1 - receivers * share) < LEAST_MASS:
            return about
        telling = _All(self._shown) if whole else self._own
        content = telling.say(self.x, step)
        given = telling.heard(content, self._plain, self._device, step)
        if not all(map(is_finite, given)):
            return about
        telling.given(self.x, given)
        for x, c in zip(self.x, given, strict=True):
            x.sub_(c, alpha=receivers * share)
        self.mass -= receivers * share * self.mass
        return torch.cat([about, content])

    def take(self, content: Tensor, share: float) -> None:
        """Adds what another site has given.

        Args:
            content: of its letter.
            share: of what it says, as its sender has given away.

        Raises:
            ValueError: the letter is of a wrong length, or its numbers cannot be.
        """
        size = nbytes_of([_ABOUT])
        (about,) = tensors_of(content[:size], [_ABOUT], torch.device("cpu"))
        mass, step, whole = about.tolist()
        if not (0 < mass < math.inf and 0 <= step < math.inf and share < 1):
            raise ValueError(f"a letter of step {step}, share {share} and mass {mass} came")
        if len(content) == size:
            return
        telling = _All(self._shown) if whole else self._own
        given = telling.heard(content[size:], self._plain, self._device, int(step))
        if not all(map(is_finite, given)):
            raise ValueError("a letter came whose numbers are not finite")
        for x, c in zip(self.x, given, strict=True):
            x.add_(c, alpha=share)
        self.mass += share * mass

    def summands(self) -> list[Tensor]:
        """Returns copies of x and of the mass, whose sums over all sites give the mean."""
        self.take_steps()
        self.show()
        mass = torch.tensor(self.mass, dtype=torch.float64, device=self._device)
        return [*(x.clone(memory_format=torch.contiguous_format) for x in self.x), mass]

    def begin_at_mean(self, sums: Sequence[Tensor]) -> None:
        """Shows the mean of all sites, and goes on from it with a mass of 1.

        Args:
            sums: of what all sites' `summands` returned.
        """
        *sums, mass = sums
        self.mass = float(mass)
        for x, total in zip(self.x, sums, strict=True):
            x.copy_(total)
        self.show()
        self.begin()

    def state(self) -> StateDict:
        """Returns copies of all that a site keeps."""
        return {"mass": self.mass, "kept": self._memory.state()}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state."""
        self.mass = state["mass"]
        self._memory.load(state["kept"])

    @property
    def _memory(self) -> Memory:
        return Memory(x=self.x, **self._own.kept)


class _All:
    """Tells all of x."""

    def __init__(self, shown: Sequence[Tensor]) -> None:
        self.origin = [t.new_zeros(()).expand(t.shape) for t in shown]  # which take no memory
        self.kept: dict[str, list[Tensor]] = {}
        self.sent = plain_of(shown)

    def say(self, x: Sequence[Tensor], step: int) -> Tensor:
        return bytes_of(x)

    def heard(
        self, content: Tensor, plain: Sequence[Plain], device: torch.device, step: int
    ) -> list[Tensor]:
        return tensors_of(content, plain, device)

    def given(self, x: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        pass


class _Reduced:
    """Tells the change since the start in few bytes, and what it left out before."""

    def __init__(self, method: SparsePush, shown: Sequence[Tensor]) -> None:
        self.origin = [t.clone() for t in shown]
        self._owed = [torch.zeros_like(t) for t in shown]
        self.kept = {"origin": self.origin, "owed": self._owed}
        self._reduce: Reduction = method.reduce  # type: ignore[assignment]
        self._seed = method.seed
        self._parts = [self._reduce.plain(tuple(t.shape), t.dtype) for t in shown]
        self.sent = [one for part in self._parts for one in part]

    def say(self, x: Sequence[Tensor], step: int) -> Tensor:
        sums = enumerate(a + b for a, b in zip(x, self._owed, strict=True))
        parts = [self._reduce.encode(v, self._seed_of(step, k)) for k, v in sums]
        return bytes_of([t for part in parts for t in part])

    def heard(
        self, content: Tensor, plain: Sequence[Plain], device: torch.device, step: int
    ) -> list[Tensor]:
        each = iter(tensors_of(content, self.sent, device))
        return [
            self._reduce.decode(
                [next(each) for _ in part], tuple(one.shape), self._seed_of(step, k)
            ).to(one.dtype)
            for k, (part, one) in enumerate(zip(self._parts, plain, strict=True))
        ]

    def given(self, x: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        for owed, a, c in zip(self._owed, x, given, strict=True):
            owed.add_(a).sub_(c)

    def _seed_of(self, step: int, index: int) -> int:
        return seed_of(self._seed, step, index)
