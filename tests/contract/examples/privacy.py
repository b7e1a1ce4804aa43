"""Transforms that outergrad knows nothing of: what a user of the library would write."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import outergrad as og
from outergrad.transforms import formed, norm, sample_norms, scaled, scaled_samples


@dataclass(frozen=True)
class Half:
    """Half of everything."""

    needs_samples = needs_all_layers = False

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        return scaled(gradient, 0.5)


@dataclass(frozen=True)
class ClippedSite:
    """The gradient of a site, no longer than a limit."""

    limit: float
    needs_samples = False
    needs_all_layers = True

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        return scaled(gradient, (self.limit / norm(gradient)).clamp(max=1.0))


@dataclass(frozen=True)
class ClippedLayers:
    """Every sample's gradient of a layer no longer than a limit."""

    limit: float
    needs_samples = True
    needs_all_layers = False

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        share = self.limit / max(gradient.samples, 1)
        return scaled_samples(gradient, (share / sample_norms(gradient)).clamp(max=1.0))


@dataclass(frozen=True)
class DPSGD:
    """Every sample's gradient no longer than a limit, and Gaussian noise (arXiv 1607.00133).

    Attributes:
        limit: of the norm of a sample's gradient, C.
        noise: standard deviation of the noise in units of the limit, sigma.
        generator: of this site's noise, of which the other sites must know nothing.
    """

    limit: float
    noise: float = 0.0
    generator: torch.Generator = field(default_factory=torch.Generator, repr=False)
    needs_samples = needs_all_layers = True

    @property
    def forms(self) -> bool:
        return self.noise > 0

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        share = self.limit / max(gradient.samples, 1)  # of a mean over the samples
        factor_B = (share / sample_norms(gradient)).clamp(max=1.0)
        clipped = scaled_samples(gradient, factor_B)
        return self._noisy(formed(clipped), self.noise * share) if self.noise else clipped

    def _noisy(self, gradient: og.SiteGradient, deviation: float) -> og.SiteGradient:
        noisy = {n: g + deviation * self._drawn(g) for n, g in gradient.formed.items()}
        return og.SiteGradient({}, noisy, gradient.params, gradient.samples)

    def _drawn(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self.generator).to(like)
