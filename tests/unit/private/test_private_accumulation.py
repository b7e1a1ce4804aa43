"""Clipped sums of several passes add up, with noise once: batches larger than the memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from by_sample import loss_of
from cases import mlp
from ranks import run_on_lasting_groups

CLIP, BATCH = 0.2, 12
MODEL = mlp(6, 7, 5)
BATCHES = [torch.randn(7, 6), torch.randn(4, 6)]


def gradients(method, sizes, steps=2, prepare=lambda private: None, **about):
    """Of each step and site; the batch in passes of these sizes."""

    def body(rank, group):
        model, found = copy.deepcopy(MODEL), []
        private = og.Private(**{"clip": CLIP, "noise": 0.0, "batch": BATCH, **about})
        prepare(private)
        session = og.distribute(model, method, group=group, transform=private)
        for _ in range(steps):
            model.zero_grad()
            *first, last = BATCHES[rank].split(sizes[rank])
            for part in first:
                with session.no_sync():
                    loss_of(model, part).backward()
            loss_of(model, last).backward()
            found.append([p.grad for p in model.parameters()])
        session.detach()
        return found

    return run_on_lasting_groups(2, body)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("method", [og.Dense(), og.DAD(always=True)], ids=["dense", "dad"])
@pytest.mark.parametrize("noise", [0.0, 1e-9])
def test_passes_make_what_one_batch_makes(clipping, method, noise):
    about = {"clipping": clipping, "noise": noise}
    whole = gradients(method, [[7], [4]], **about)
    parts = gradients(method, [[3, 2, 2], [4]], **about)
    for one, other in zip(whole[0] + whole[1], parts[0] + parts[1], strict=True):
        for expected, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert bool(expected.any())


def test_noise_is_drawn_once_per_step():
    drawn = []

    class Counting:
        def draw(self, count, device):
            drawn.append(count)
            return torch.zeros(count)

    def prepare(private):
        object.__setattr__(private, "_source", Counting())

    gradients(og.Dense(), [[3, 2, 2], [2, 2]], steps=3, prepare=prepare, noise=1.0)
    assert sum(drawn) == 2 * 3 * sum(p.numel() for p in MODEL.parameters())


def test_thrown_away_passes_leave_nothing():
    def body(rank, group):
        model = copy.deepcopy(MODEL)
        private = og.Private(clip=CLIP, noise=0.0, batch=BATCH)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        with session.no_sync():
            loss_of(model, 3 * BATCHES[rank]).backward()
        model.zero_grad()
        loss_of(model, BATCHES[rank]).backward()
        session.detach()
        return [p.grad for p in model.parameters()]

    found, expected = run_on_lasting_groups(2, body)[0], gradients(og.Dense(), [[7], [4]], 1)[0][0]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_parts_that_one_pass_alone_uses_are_shared():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.both = mlp(6, 6, 6), True

        def forward(self, x):
            return self.layers(x) if self.both else self.layers[0](x)

    def body(rank, group):
        torch.manual_seed(0)
        model = Chosen()
        private = og.Private(clip=CLIP, noise=1.0, batch=BATCH)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        with session.no_sync():
            loss_of(model, BATCHES[rank]).backward()
        model.both = False
        loss_of(model, BATCHES[rank]).backward()
        session.detach()
        return [p.grad for p in model.parameters()]

    first, second = run_on_lasting_groups(2, body)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert bool(one.any())


def test_adaptive_clipping_wants_one_pass():
    def body(rank, group):
        private = og.Private(clip=CLIP, noise=0.2, batch=BATCH, clipping="adaptive")
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        with pytest.raises(RuntimeError, match="share every backward"), session.no_sync():
            pass
        session.detach()

    run_on_lasting_groups(2, body)
