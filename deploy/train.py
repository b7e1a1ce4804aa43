"""A site's training in the smallest form; its data is drawn: train.py SITE."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import outergrad as og
import outergrad.star.backend  # not needed with PyTorch 2.14 and later

site = sys.argv[1]
# The kit is that of `outergrad site`.
dist.init_process_group("outergrad", init_method="star://?reach_s=120")
own = torch.Generator().manual_seed(sum(map(ord, site)))
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
session = og.distribute(model, og.DAD(), timeout=120)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(200):
    x = torch.randn(32, 20, generator=own)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
weights = sum(p.double().sum() for p in model.parameters())
print(f"{site}: loss {loss.item():.3f}, sum of weights {weights.item():.9f}")
dist.destroy_process_group()
