"""Scales inputs."""

import torch
from torch import Tensor


def standardise(train: Tensor, test: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Gives training inputs mean 0 and variance 1 over ``dims``, and test inputs the same scale."""
    variance, mean = torch.var_mean(train, dims, keepdim=True)
    return (train - mean) / variance.sqrt(), (test - mean) / variance.sqrt()
