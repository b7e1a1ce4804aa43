"""What transforms of gradients work with: `og.distribute(..., transform=)`."""

from outergrad.core.transform import GradientTransform, SampleRows, SiteGradient
from outergrad.linalg.site_gradient import formed, norm, sample_norms, scaled, scaled_samples

__all__ = [
    "GradientTransform",
    "SampleRows",
    "SiteGradient",
    "formed",
    "norm",
    "sample_norms",
    "scaled",
    "scaled_samples",
]
