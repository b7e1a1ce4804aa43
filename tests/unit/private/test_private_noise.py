"""The noise on what is released has the variance that is claimed, of all sites together.

By chi squared over 2,000 numbers of 250 steps.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import outergrad as og
from cases import mlp
from outergrad.private.noise import Generated, Noise, Random, Secure, add
from outergrad.step.step import SharedStep
from ranks import run_on_lasting_groups
from released_noise import released_noise, within

CLIP, SIGMA, BATCH, STEPS = 0.3, 1.5, 8, 250
SOURCES = {
    "random": Random(),
    "secure": Secure(),
    "generator": Generated(torch.Generator().manual_seed(1)),
}


class Silent:
    """A source that leaves its noise out."""

    def draw(self, count, device):
        return torch.zeros(count)


def released(sites: int, steps: int, silent: int | None = None, **about) -> list[torch.Tensor]:
    """Per site, noise on the released sums of each step (steps, 8): samples add nothing."""

    def private_of(rank):
        private = og.Private(**{"clip": CLIP, "noise": SIGMA, "batch": BATCH, **about})
        if rank == silent:
            object.__setattr__(private, "_source", Silent())
        return private

    return released_noise(private_of, sites, steps)


@pytest.mark.parametrize("sites", [2, 3])
def test_released_sums_have_the_noise_that_is_claimed(sites):
    """Of standard deviation σ C on the sum, whatever the number of sites."""
    noise = released(sites, STEPS)[0]
    assert within(float(noise.square().sum()), noise.numel(), SIGMA * CLIP)
    assert abs(float(noise.mean())) < 5 * SIGMA * CLIP / math.sqrt(noise.numel())


@pytest.mark.parametrize("sites", [2, 3])
def test_it_is_noticed_if_one_site_leaves_its_noise_out(sites):
    noise = released(sites, STEPS, silent=0)[0]
    squares, count = float(noise.square().sum()), noise.numel()
    assert not within(squares, count, SIGMA * CLIP)
    assert within(squares, count, SIGMA * CLIP * math.sqrt((sites - 1) / sites))


@pytest.mark.parametrize("about", [{"secure": True}, {"clipping": "per_layer"}])
def test_other_sources_and_clippings_have_it_too(about):
    noise = released(2, 100, **about)[0]
    assert within(float(noise.square().sum()), noise.numel(), SIGMA * CLIP)


def test_adaptive_noise_counts_for_gradients_and_counts_together():
    """1/σ² is 1/σ_g² of the gradients plus 1/(2 σ_b)² of counts that change by a half."""
    about = {"clipping": "adaptive", "count_noise": 1.0, "rate": 1e-9}
    noise = released(2, 200, **about)[0]
    of_gradients = (SIGMA**-2 - 2.0**-2) ** -0.5
    assert of_gradients > SIGMA
    assert within(float(noise.square().sum()), noise.numel(), of_gradients * CLIP)


def test_noise_differs_between_steps_but_not_between_replicas():
    first, second = released(2, 5)
    assert torch.equal(first, second)
    assert len(first.unique()) == first.numel()


class Watched:
    """A transform whose results are kept."""

    needs_samples = needs_all_layers = forms = adds_up = True

    def __init__(self, inner):
        self._inner, self.returned = inner, []

    def __repr__(self):
        return repr(self._inner)

    def __call__(self, gradient):
        found = self._inner(gradient)
        self.returned.append(torch.cat([g.flatten() for g in found.formed.values()]))
        return found


def test_sites_draw_other_noise_of_equal_shares():
    """No site knows the noise of the others, which is on what it sends itself."""

    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Linear(50, 4)
        watched = Watched(og.Private(clip=CLIP, noise=SIGMA, batch=BATCH))
        session = og.distribute(model, og.Dense(), group=group, transform=watched)
        (0.0 * model(torch.ones(2, 50)).mean()).backward()
        session.detach()
        return watched.returned

    sites = [torch.cat(returned) for returned in run_on_lasting_groups(3, body)]
    for k, own in enumerate(sites):
        share = SIGMA * CLIP / math.sqrt(3) * 3 / BATCH  # of a mean over three sites
        assert within(float(own.square().sum()), own.numel(), share)
        assert not set(own.tolist()) & {n for other in sites[:k] for n in other.tolist()}


def test_a_step_that_starts_again_keeps_its_noise(monkeypatch):
    """A site draws once per step, also if sites find that their headers are not the foreseen."""
    again, start_again = [], SharedStep._start_again
    monkeypatch.setattr(SharedStep, "_start_again", lambda s: (again.append(1), start_again(s)))
    drawn: list[list[int]] = [[], []]

    class Counting(Random):
        def __init__(self, rank):
            super().__init__()
            self._rank = rank

        def draw(self, count, device):
            drawn[self._rank][-1] += count
            return super().draw(count, device)

    def body(rank, group):
        torch.manual_seed(0)
        layers = {name: nn.Linear(4, 4) for name in ("first", "second")}
        model = nn.ModuleDict(layers)
        whole = Chosen(model)
        private = og.Private(clip=CLIP, noise=SIGMA, batch=BATCH)
        object.__setattr__(private, "_source", Counting(rank))
        session = og.distribute(whole, og.Dense(), group=group, transform=private)
        found = []
        for step in range(6):
            whole.zero_grad()
            drawn[rank].append(0)
            whole.both = step in (3, 4) and rank == 0  # surprises the others, who have sent
            whole(torch.ones(2, 4)).sum().backward()
            found.append([p.grad for p in whole.parameters()])
        session.detach()
        return found

    first, second = run_on_lasting_groups(2, body)
    assert again
    for ours, theirs in zip(first, second, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    numbers = sum(p.numel() for p in mlp(4, 4, 4).parameters())
    assert all(count == numbers for counts in drawn for count in counts)


class Chosen(nn.Module):
    """Uses its second layer when it is told so."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.both = layers, False

    def forward(self, x):
        y = self.layers["first"](x)
        return self.layers["second"](y) if self.both else y


def test_other_sites_do_not_hear_how_many_samples_a_batch_has(monkeypatch):
    """So that batches of any size are foreseen, too: no step starts again."""
    again, headers = [], set()
    monkeypatch.setattr(SharedStep, "_start_again", lambda s: again.append(1))
    announce = SharedStep._announce
    monkeypatch.setattr(
        SharedStep, "_announce", lambda s, h: (headers.add((h.uses, h.weight)), announce(s, h))
    )

    def body(rank, group):
        torch.manual_seed(0)
        model = mlp(6, 4, 3)
        private = og.Private(clip=CLIP, noise=SIGMA, batch=BATCH)
        session = og.distribute(model, og.DAD(always=True), group=group, transform=private)
        for size in (4, 4, 4, 0, 7, 1, 900):
            model.zero_grad()
            model(torch.ones(size + rank, 6)).mean().backward()
        session.detach()

    run_on_lasting_groups(2, body)
    assert not again
    assert len(headers) == 1


# -- sources ----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("count", [1, 7, 200_001])
def test_sources_draw_normal_numbers(source: Noise, count):
    drawn = source.draw(count, torch.device("cpu")).double()
    assert drawn.shape == (count,)
    if count == 1:
        return
    assert within(float(drawn.square().sum()), count, 1.0)
    assert abs(float(drawn.sum())) < 5 * math.sqrt(count)
    if count > 1000:
        normal = torch.distributions.Normal(0.0, 1.0)
        for at in (-3.0, -1.5, -0.5, 0.0, 0.5, 1.5, 3.0):
            share = float(normal.cdf(torch.tensor(at)))
            found = int((drawn <= at).sum())
            assert abs(found - share * count) < 5 * math.sqrt(count * share * (1 - share)), at
        half = count // 2  # numbers of a pair are independent, and so are neighbours
        for one, other in ((drawn[:half], drawn[half : 2 * half]), (drawn[:-1], drawn[1:])):
            assert abs(float((one * other).sum())) < 5 * math.sqrt(len(one))
            both = one.square() - 1, other.square() - 1
            assert abs(float((both[0] * both[1]).sum())) < 5 * 2 * math.sqrt(len(one))


@pytest.mark.parametrize("source", [Random(), Secure()], ids=["random", "secure"])
def test_no_seed_repeats_a_draw(source):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = source.draw(64, torch.device("cpu"))
    torch.manual_seed(0)
    assert not set(first.tolist()) & set(source.draw(64, torch.device("cpu")).tolist())
    assert torch.equal(before, torch.get_rng_state())


def test_a_tensor_of_any_layout_and_size_gets_noise_everywhere():
    for t in (torch.zeros(300, 700), torch.zeros(70, 30).T, torch.zeros(3, 0), torch.zeros(1)):
        noisy = add(Random(), t, 2.0)
        assert noisy.shape == t.shape
        # Noise in float32 is exactly 0 now and then: once in some million draws.
        assert int((noisy == 0).sum()) <= min(3, t.numel() // 1000)


def test_copies_have_noise_of_their_own():
    private = og.Private(clip=CLIP, noise=SIGMA, batch=BATCH, clipping="adaptive", count_noise=9.0)
    private.load_state_dict({"clip": 0.7})
    for other in (copy.deepcopy(private), pickle.loads(pickle.dumps(private))):
        assert other == private
        assert other.clip_now == 0.7
        ours, theirs = (
            one._source.draw(32, torch.device("cpu")).tolist() for one in (private, other)
        )
        assert not set(ours) & set(theirs)
    given = og.Private(
        clip=CLIP, noise=SIGMA, batch=BATCH, generator=torch.Generator().manual_seed(3)
    )
    with pytest.raises(TypeError, match=r"same noise .* make another"):
        copy.deepcopy(given)


def test_nothing_of_the_noise_is_in_a_state():
    private = og.Private(clip=CLIP, noise=SIGMA, batch=BATCH)
    assert private.state_dict() == {"clip": CLIP}
    assert "generator" not in repr(private)
