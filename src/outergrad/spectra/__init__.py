"""Ranks of gradients: the bounds that an architecture and a batch set, and what is measured."""

from outergrad.linalg.spectra import numerical_rank
from outergrad.spectra.bounds import Limit, RankBound, rank_bounds

__all__ = ["Limit", "RankBound", "numerical_rank", "rank_bounds"]
