"""Tasks of kind "coding": sparse codes of patches of images, and the dictionary that makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outergrad.launch.errors import RecipeError
from outergrad.optim import CoGD
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.task import Context, at_least

SHAPES = {"cifar10": (3, 32), "pneumonia": (1, 28)}
"""Channels of an image and its side; channels are averaged to grey."""
_TURN = 10
"""Steps of ADMM for the codes, and as many for the dictionary, before the other has its turn."""


@dataclass(frozen=True, kw_only=True)
class CodingWork:
    """Finds codes Z and a dictionary D for patches B: least |M (B - D Z)|² / 2 + l1 |Z|₁.

    Columns of D are no longer than 1. M marks the pixels that are known.

    Attributes:
        data: One of `SHAPES`.
        way: One of `WAYS`.
        known: Share of the pixels that are known, the same ones for each way: 1 for all.
        coupling: Of `og.optim.CoGD`; the ways without it do not use it.
        lr: Learning rate; ADMM has none.
        l1: Penalty on the codes.
        side: Height and width of a patch.
        atoms: Columns of the dictionary.
        patches: Number of patches, one of each image.
        passes: Computations of the gradients, or steps of ADMM, over all patches.
        seed: Seed of patches, known pixels and the first dictionary.
    """

    data: str
    way: str
    known: float = 1.0
    coupling: float = 1.0
    lr: float = 0.01
    l1: float = 0.1
    side: int = at_least(2, 8)
    atoms: int = at_least(1, 100)
    patches: int = at_least(1, 2000)
    passes: int = at_least(1)
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses data that is no images, and ways that are not known."""
        for name, value, known in (("data", self.data, SHAPES), ("way", self.way, WAYS)):
            if value not in known:
                raise RecipeError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.known > 1:
            raise RecipeError(f"known={self.known} must be a share, 1 or less")

    def run(self, context: Context) -> dict[str, Any]:
        """Learns, in one step of progress per pass."""
        context.steps(self.passes)
        problem = self._problem(load(self.data, context.data_dir))
        found = problem.start
        for passed in WAYS[self.way](self, problem):
            found = passed
            context.advance()
        return {"rows": [problem.judged(found, self.l1)]}

    def _problem(self, data: Dataset) -> Problem:
        generator = torch.Generator().manual_seed(self.seed)
        channels, side = SHAPES[self.data]
        images = data.x_train.reshape(-1, channels, side, side).mean(1)
        chosen = torch.randperm(len(images), generator=generator)[: self.patches]
        corners = torch.randint(side - self.side + 1, (len(chosen), 2), generator=generator)
        cut = [
            images[k, y : y + self.side, x : x + self.side].flatten()
            for k, (y, x) in zip(chosen.tolist(), corners.tolist(), strict=True)
        ]
        pixels_PN = torch.stack(cut, 1)
        known_PN = (torch.rand(pixels_PN.shape, generator=generator) < self.known).float()
        mean_N = (known_PN * pixels_PN).sum(0) / known_PN.sum(0).clamp_min(1)
        first_PK = torch.randn(len(pixels_PN), self.atoms, generator=generator)
        return Problem(
            b_PN=(pixels_PN - mean_N) / images.std(),
            known_PN=known_PN,
            first_PK=first_PK / first_PK.norm(dim=0),
            peak=((images.amax() - images.amin()) / images.std()).item(),
        )


class Found(NamedTuple):
    """A dictionary and codes.

    Attributes:
        d_PK: Atoms, as columns.
        z_KN: Codes, a column for each patch.
    """

    d_PK: Tensor
    z_KN: Tensor


class Problem(NamedTuple):
    """Patches to code.

    Attributes:
        b_PN: Patches, as columns, less the mean of their known pixels; images have deviation 1.
        known_PN: 1 where a pixel is known, else 0.
        first_PK: The first dictionary.
        peak: Distance of the brightest and the darkest pixel of all images.
    """

    b_PN: Tensor
    known_PN: Tensor
    first_PK: Tensor
    peak: float

    @property
    def start(self) -> Found:
        """The first dictionary, and codes of zeros."""
        codes_KN = self.b_PN.new_zeros(self.first_PK.shape[1], self.b_PN.shape[1])
        return Found(self.first_PK.clone(), codes_KN)

    def misfit(self, found: Found) -> Tensor:
        """Returns half of the squared error in the known pixels."""
        return (self.known_PN * (found.d_PK @ found.z_KN - self.b_PN)).square().sum() / 2

    def judged(self, found: Found, l1: float) -> dict[str, float]:
        """Returns the objective per patch, the PSNR of all pixels in dB, and the share of codes."""
        objective = (self.misfit(found) + l1 * found.z_KN.abs().sum()) / self.b_PN.shape[1]
        error = (found.d_PK @ found.z_KN - self.b_PN).square().mean()
        return {
            "objective": objective.item(),
            "psnr": 10 * math.log10(self.peak**2 / max(error.item(), 1e-20)),
            "nonzero": (found.z_KN != 0).float().mean().item(),
        }


def _by_gradient(*, coupled: bool, alternate: bool) -> Callable[..., Iterator[Found]]:
    def way(work: CodingWork, problem: Problem) -> Iterator[Found]:
        found = Found(*map(nn.Parameter, problem.start))
        pair = {"params": [found.z_KN, found.d_PK], "pair": (0, 1)}
        coupling = work.coupling if coupled else 0.0
        optimizer = CoGD([pair], lr=work.lr, l1=work.l1, coupling=coupling)
        for k in range(work.passes):
            optimizer.zero_grad()
            problem.misfit(found).backward()
            if alternate:
                found[k % 2].grad = None
            optimizer.step()
            with torch.no_grad():
                found.d_PK.copy_(no_longer_than_1(found.d_PK))
            yield Found(*(p.detach() for p in found))

    return way


def _by_admm(work: CodingWork, problem: Problem) -> Iterator[Found]:
    """Alternating direction method of multipliers: ten steps for codes, ten for the dictionary.

    The codes X are split from sparse ones Z = X and from their patches V = D X, both with penalty
    1. The dictionary follows the gradient, by the inverse of the largest curvature.
    """
    (d_PK, z_KN), known_PN = problem.start, problem.known_PN
    v_PN, of_z_KN, of_v_PN = d_PK @ z_KN, torch.zeros_like(z_KN), torch.zeros_like(problem.b_PN)
    for k in range(work.passes):
        if (k // _TURN) % 2 == 0:
            gram_KK = d_PK.mT @ d_PK + torch.eye(work.atoms)
            wanted_KN = d_PK.mT @ (v_PN - of_v_PN) + z_KN - of_z_KN
            x_KN = torch.linalg.solve(gram_KK, wanted_KN)
            made_PN = d_PK @ x_KN
            v_PN = (known_PN * problem.b_PN + made_PN + of_v_PN) / (known_PN + 1)
            z_KN = nn.functional.softshrink(x_KN + of_z_KN, work.l1)
            of_z_KN, of_v_PN = of_z_KN + x_KN - z_KN, of_v_PN + made_PN - v_PN
        else:
            residual_PN = known_PN * (d_PK @ z_KN - problem.b_PN)
            curvature = torch.linalg.matrix_norm(z_KN @ z_KN.mT, 2).clamp_min(1e-12)
            d_PK = no_longer_than_1(d_PK - residual_PN @ z_KN.mT / curvature)
        yield Found(d_PK, z_KN)


def no_longer_than_1(d_PK: Tensor) -> Tensor:
    """Returns the nearest dictionary whose columns have norms of 1 at most."""
    return d_PK / d_PK.norm(dim=0).clamp_min(1)


WAYS: dict[str, Callable[[CodingWork, Problem], Iterator[Found]]] = {
    "CoGD": _by_gradient(coupled=True, alternate=False),
    "joint Adam": _by_gradient(coupled=False, alternate=False),
    "alternating Adam": _by_gradient(coupled=False, alternate=True),
    "ADMM": _by_admm,
}
"""Yield a dictionary and codes after each pass. All by gradients shrink codes alike."""
