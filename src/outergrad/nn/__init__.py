"""Modules that make use of several sites."""

from outergrad.nn.distribution_correction import DistributionCorrection, collecting, share

__all__ = ["DistributionCorrection", "collecting", "share"]
