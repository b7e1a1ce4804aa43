"""Losses of a training over the default group, whichever backend it has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def losses_of(model: torch.nn.Module, steps: int) -> list[float]:
    """Of this site, whose rows are its own; the model takes six features."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
