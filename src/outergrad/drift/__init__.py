"""Exchanges when data drift: detectors, which listen to a stream of numbers at their site."""

from outergrad.drift.by_river import ADWIN, PageHinkley
from outergrad.drift.detectors import Detector, Monitor
from outergrad.drift.kolmogorov_smirnov import KolmogorovSmirnov

__all__ = ["ADWIN", "Detector", "KolmogorovSmirnov", "Monitor", "PageHinkley"]
