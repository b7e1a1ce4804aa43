"""Random numbers that a test starts from."""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    """Like torch.manual_seed, which takes milliseconds where devices have not been used yet.

    It keeps a whole stack for each device that is not there, and there is one call per test.
    """
    torch.random.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)
