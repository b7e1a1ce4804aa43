"""Trainings of which parts are computed again by all sites, beside what they must come to."""

from __future__ import annotations

import copy
import threading

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import outergrad as og
from cases import relative_error
from outergrad.replay import context
from ranks import run_on_lasting_groups

STEPS = 4

EPS = torch.finfo(torch.float32).eps


def loss(y):
    y = y[0] if isinstance(y, tuple) else y
    y = y.data if isinstance(y, PackedSequence) else y
    return (y * y).mean() + y.sin().mean()


def train(original, method, inputs, rank, group, steps=STEPS):
    replica = copy.deepcopy(original)
    session = og.distribute(replica, method, group=group)
    for _ in range(steps):
        replica.zero_grad()
        loss(replica(*inputs[rank])).backward()
    session.detach()
    return {name: p.grad for name, p in replica.named_parameters()}, session


def pooled(original, inputs):
    model = copy.deepcopy(original).double()
    for batch in inputs:
        doubled = [_double(t) for t in batch]
        (loss(model(*doubled)) / len(inputs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _double(t):
    if isinstance(t, PackedSequence):
        return t.double()
    return t.double() if t.is_floating_point() else t


def by_ddp(original, inputs):
    """What DistributedDataParallel leaves: the mean of what each site computes in float32."""
    model = copy.deepcopy(original)
    for batch in inputs:
        (loss(model(*batch)) / len(inputs)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def whole_error(found, expected):
    """Of all gradients as one vector."""
    names = [name for name, gradient in expected.items() if gradient is not None]
    flat = [torch.cat([g[name].double().flatten() for name in names]) for g in (found, expected)]
    return relative_error(*flat)


def check(original, method, inputs, travels=None):
    """Exact on all sites, the same to the bit."""
    expected = pooled(original, inputs)
    peer = whole_error(by_ddp(original, inputs), expected)

    def body(rank, group):
        return train(original, method, inputs, rank, group)

    results = run_on_lasting_groups(len(inputs), body)
    for gradients, session in results:
        for name, gradient in gradients.items():
            assert relative_error(gradient, expected[name]) < 5e-6, name
            assert gradient is None or gradient.equal(results[0][0][name]), name
        error = whole_error(gradients, expected)
        # Below the last digit of a float32, DDP is closer on some machines by chance alone.
        assert error <= max(2 * peer, EPS), f"{error:.1e}, DDP {peer:.1e}"
        for name in travels or ():
            lines = {line.parameter: line.travels for line in session.coverage()}
            assert lines[name] == "replayed", lines
    return results


def rows(sites, *shape):
    return [(torch.randn(4 + 3 * rank, *shape),) for rank in range(sites)]


class Stack(nn.Module):
    """Pre-norm transformer blocks over embedded ids."""

    def __init__(self, blocks=3, width=16, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 20)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(self.norm(x))


def ids(sites, length=5):
    return [(torch.randint(0, 20, (3 + rank, length)),) for rank in range(sites)]


class Seeds:
    """A seed for every use of a block, known beforehand: by thread, in the order of forward."""

    def __init__(self):
        self.local = threading.local()

    def __call__(self, device):
        self.local.count = getattr(self.local, "count", -1) + 1
        return 100 * self.local.rank + self.local.count


def train_seeded(monkeypatch, model, method, inputs, steps=1):
    """Gradients of every site; random numbers are drawn from `Seeds`."""
    seeds = Seeds()
    monkeypatch.setattr(context, "next_seed", seeds)

    def body(rank, group):
        seeds.local.rank = rank
        return train(model, method, inputs, rank, group, steps)[0]

    return run_on_lasting_groups(len(inputs), body)


def assert_all_have(found, whole):
    """All sites have the gradients of a model in float64, and the same to the bit."""
    for gradients in found:
        for name, p in whole.named_parameters():
            assert relative_error(gradients[name], p.grad) < 5e-6, name
            assert gradients[name].equal(found[0][name]), name
