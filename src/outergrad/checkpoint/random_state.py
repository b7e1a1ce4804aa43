"""Random streams of a process as plain tensors and numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from outergrad.core.types import StateDict


def random_state() -> StateDict:
    """Returns the random states of torch (CPU, and CUDA if in use), NumPy and Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    words = np.asarray(keys, np.int64)
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [kind, torch.from_numpy(words), position, has_gauss, gauss],
        "python": [version, list(numbers), next_gauss],
    }


def set_random_state(state: StateDict) -> None:
    """Sets the random states; those of CUDA only if there are as many devices."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
