"""The noise scale that a site records of its own norms is that of its gradients."""

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events
from outergrad._noise import RECENT, RecentNoise
from outergrad.events import Layer
from ranks import run_on_lasting_groups

ABOUT = {
    "rank": 0,
    "layer": "weight",
    "travels": "dense",
    "rows": 0,
    "kept_rows": 0,
    "sent_bytes": 0,
    "received_bytes": 0,
    "compress_s": 0.0,
    "replay_s": 0.0,
    "wait_s": 0.0,
}


@pytest.mark.parametrize("sites", [2, 4])
def test_of_gradients_of_known_noise(sites):
    """Signal of norm 1, noise of variance 3 in a batch: three batches have as much of each."""
    torch.manual_seed(0)
    width, noise = 20_000, RecentNoise()
    signal = torch.full((width,), width**-0.5)
    for step in range(RECENT):
        own = signal + (3 / width) ** 0.5 * torch.randn(sites, width)
        norms = {"gradient_norm": float(own[0].norm()), "mean_norm": float(own.mean(0).norm())}
        noise.take([Layer(**ABOUT, step=step, **norms)])
    assert noise.batches(sites) == pytest.approx(3, rel=0.1)


def test_nothing_is_made_up():
    noise = RecentNoise()
    assert noise.batches(2) is None
    noise.take([Layer(**ABOUT, step=0, gradient_norm=1.0)])
    assert noise.batches(2) is None
    noise.take([Layer(**ABOUT, step=1, gradient_norm=2.0, mean_norm=1.0)])
    assert noise.batches(2) is None  # no signal is left
    assert noise.batches(1) is None


@pytest.mark.parametrize("method", [og.DAD(), og.Dense()], ids=["dad", "dense"])
def test_steps_have_it(method):
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3))

    def body(rank, group):
        net, events = copy.deepcopy(original), Events()
        session = og.distribute(net, method, group=group, recorder=events)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            net.zero_grad()
            x = torch.randn(16, 30, generator=generator)
            (net(x) - x[:, :3]).square().mean().backward()
        session.detach()
        return events

    for events in run_on_lasting_groups(2, body):
        steps = [event for event in events if isinstance(event, og.events.Step)]
        own = sum(e.gradient_norm**2 for e in events.layers)
        mean = sum(e.mean_norm**2 for e in events.layers)
        expected = 2 * (own - mean) / (2 * mean - own)
        assert steps[-1].noise_batches == pytest.approx(expected)
