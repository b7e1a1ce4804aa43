"""Building blocks for transforms of gradients: `og.distribute(..., transform=)`."""

from outergrad.core.transform import (
    GradientTransform,
    Projection,
    SampleRows,
    Samples,
    SiteGradient,
)
from outergrad.linalg.site_gradient import (
    formed,
    norm,
    sample_norms,
    sampled,
    scaled,
    scaled_samples,
)

__all__ = [
    "GradientTransform",
    "Projection",
    "SampleRows",
    "Samples",
    "SiteGradient",
    "formed",
    "norm",
    "sample_norms",
    "sampled",
    "scaled",
    "scaled_samples",
]
