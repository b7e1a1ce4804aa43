"""Trains at a site of an NVFLARE job, and writes its losses: SITE FOLDER [a site that fails]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

STEPS = 12


def new_model() -> nn.Module:
    """In double precision; sites begin with that of the first."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def loss_at(site: str, step: int, model: nn.Module) -> torch.Tensor:
    """Of a batch that the site alone has."""
    own = torch.Generator().manual_seed(1000 * int(site.removeprefix("site-")) + step)
    x = torch.randn(5, 6, generator=own, dtype=torch.double)
    return nn.functional.mse_loss(model(x), x[:, :2].sin())


def train(site: str, folder: str) -> None:
    """As a site of the job's star."""
    import outergrad as og

    model = new_model()
    og.distribute(model, og.DAD(), transport=og.Star())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_at(site, step, model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    Path(folder, f"{site}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    if sys.argv[1] in sys.argv[3:]:
        raise SystemExit(3)
    train(*sys.argv[1:3])
