"""Adaptive clipping goes to the quantile of the norms, alike on all sites."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.private.quantile import Threshold
from ranks import run_on_lasting_groups
from stars import on_star

BATCH = 400


def train(sites: int, steps: int, norms_of: list[torch.Tensor], **about) -> list[list[float]]:
    """Thresholds by step and site; a sample's gradient is as long as its only feature."""

    def body(rank, group):
        model = nn.Linear(1, 1, bias=False)
        settings = {"clip": 0.1, "noise": 0.2, "batch": BATCH, "clipping": "adaptive"}
        private = og.Private(**(settings | about))
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        found = []
        for _ in range(steps):
            model.zero_grad()
            model(norms_of[rank][:, None]).mean().backward()
            found.append(private.clip_now)
        session.detach()
        return found

    return run_on_lasting_groups(sites, body)


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("sites", [2, 3])
def test_it_converges_to_the_quantile(sites, quantile):
    """Of the samples of all sites together, whose norms differ from site to site."""
    torch.manual_seed(1)
    norms_S = [(k + 1) * torch.rand(BATCH // sites) for k in range(sites)]
    first, *others = train(sites, 150, norms_S, quantile=quantile)
    assert all(other == first for other in others)
    near = torch.tensor(first[-50:]).mean()
    share = float((torch.cat(norms_S) <= near).double().mean())
    assert abs(share - quantile) < 0.05
    assert abs(float((torch.cat(norms_S) <= 0.1).double().mean()) - quantile) > 0.15


def test_a_batch_of_random_size_does_not_move_it_one_way():
    """Samples that are missing count as half below: the threshold stays without a batch."""
    first = train(2, 20, [torch.zeros(0), torch.zeros(0)], count_noise=1.0, rate=0.5)[0]
    assert 0.09 < first[-1] < 0.11
    assert len(set(first)) == 20


def test_it_is_steered_by_the_noisy_count_of_all_sites():
    """C e^(-η (b - γ)), as in the paper, where b is the share of samples below C."""
    norms_S = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])]
    about = {"clip": 2.5, "noise": 0.0, "batch": 4, "quantile": 0.7, "rate": 0.2}
    first, second = train(2, 1, norms_S, **about)
    assert first == second
    assert math.isclose(first[0], 2.5 * math.exp(-0.2 * (0.5 - 0.7)), rel_tol=1e-6)


def test_counts_have_the_noise_that_is_claimed():
    deviation, told = 7.0, []
    for _ in range(2000):
        private = og.Private(
            clip=1.0, noise=0.5, batch=BATCH, clipping="adaptive", count_noise=deviation
        )
        private._count(torch.zeros(0), 4)
        told.append(float(private.tell()[0]))
    squares = sum(one**2 for one in told) / (deviation**2 / 4)
    assert abs(squares - 2000) < 5 * math.sqrt(2 * 2000)


def test_sites_with_other_thresholds_are_told_so():
    sites = [Threshold(start, 0.5, 0.2, 10) for start in (1.0, 4.0)]
    for one in sites:
        one.count(torch.zeros(3), torch.zeros((), dtype=torch.float64), 2)
    total = sum(one.tell() for one in sites)
    for one in sites:
        with pytest.raises(RuntimeError, match=r"all together to 2 on average.* state_dict\(\)"):
            one.hear(total)


def test_a_threshold_goes_on_from_a_state():
    private = og.Private(clip=1.0, noise=0.5, batch=BATCH, clipping="adaptive")
    private.load_state_dict({"clip": 0.25})
    assert private.clip_now == 0.25
    assert private.state_dict() == {"clip": 0.25}
    for state in ({}, {"clip": -1.0}, {"clip": math.nan}):
        with pytest.raises(ValueError, match="load what state_dict"):
            private.load_state_dict(state)
    fixed = og.Private(clip=1.0, noise=0.5, batch=BATCH)
    fixed.load_state_dict({"clip": 1.0})
    with pytest.raises(ValueError, match="give it the saved one"):
        fixed.load_state_dict({"clip": 0.25})


def test_checkpoints_save_the_threshold(tmp_path):
    def body(rank, group):
        model = nn.Linear(1, 1, bias=False)
        private = og.Private(clip=0.1, noise=0.2, batch=BATCH, clipping="adaptive")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = og.distribute(model, og.Dense(), group=group, transform=private)
        about = {"model": model, "optimizer": optimizer, "private": private}
        checkpoints = og.Checkpoints(tmp_path, session, **about)
        model(torch.ones(3, 1)).mean().backward()
        checkpoints.save(1)
        saved = private.clip_now
        private.load_state_dict({"clip": 7.0})
        assert checkpoints.restore() is not None
        session.detach()
        return saved, private.clip_now

    for saved, loaded in run_on_lasting_groups(2, body):
        assert 0.1 != saved == loaded


def test_a_step_that_does_not_count_does_not_move_it():
    def body(rank, group):
        model = nn.Linear(1, 1, bias=False)
        private = og.Private(clip=0.1, noise=0.2, batch=BATCH, clipping="adaptive")
        about = {"transform": private, "max_bad_steps": 5}
        session = og.distribute(model, og.Dense(), group=group, **about)
        model(torch.full((2, 1), math.nan if rank else 1.0)).mean().backward()
        after_bad = private.clip_now, model.weight.grad
        model.zero_grad()
        model(torch.ones(2, 1)).mean().backward()
        session.detach()
        return *after_bad, private.clip_now

    for bad, grad, good in run_on_lasting_groups(2, body):
        assert bad == 0.1
        assert grad is None
        assert good != 0.1


@pytest.mark.parametrize("blind", [False, True])
def test_through_a_hub(blind):
    """Whose masked sums are rounded: thresholds are equal on all sites all the same."""

    def body(rank, transport):
        torch.manual_seed(0)
        model, found = nn.Linear(4, 2), []
        private = og.Private(clip=0.01, noise=0.2, batch=BATCH, clipping="adaptive")
        session = og.distribute(model, og.Dense(), transport=transport, transform=private)
        for _ in range(5):
            model.zero_grad()
            model(torch.ones(3 + rank, 4)).square().mean().backward()
            found.append((private.clip_now, model.weight.grad.tolist()))
        session.detach()
        return found

    first, second = on_star(2, body, {"blind": blind})
    assert first == second
    assert len({clip for clip, _ in first}) == 5
