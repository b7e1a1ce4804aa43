"""Clipping and noise of what is sent alone: norms, sensitivity, variance, and what arrives."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import outergrad as og
from cases import mlp
from outergrad.core.transform import SampleRows, SiteGradient
from outergrad.core.types import Factors, Slot
from outergrad.linalg.projections import OnDirections, OnEntries
from outergrad.linalg.site_gradient import sample_norms
from ranks import run_on_lasting_groups

CLIP, SIGMA, BATCH = 0.3, 1.5, 8
PRIVATE = {"clip": CLIP, "noise": SIGMA, "batch": BATCH, "sent_only": True}
SAMPLES, OUTPUTS, INPUTS = 5, 7, 6


def directions(width, count, *, left):
    return OnDirections(torch.linalg.qr(torch.randn(width, count))[0], left)


PROJECTIONS = {
    "left": lambda: directions(OUTPUTS, 3, left=True),
    "right": lambda: directions(INPUTS, 2, left=False),
    "entries": lambda: OnEntries(torch.randperm(OUTPUTS * INPUTS)[:9], (OUTPUTS, INPUTS)),
}


def site_gradient(rows_per_sample, sent):
    count = SAMPLES * rows_per_sample
    slot = Slot("layer", "w", OUTPUTS, INPUTS, bias="b")
    samples_N = torch.arange(count) % SAMPLES
    factors = Factors(torch.randn(1, count, OUTPUTS), torch.randn(1, count, INPUTS))
    params = {"w": torch.zeros(OUTPUTS, INPUTS), "b": torch.zeros(OUTPUTS)}
    part = SampleRows(factors, samples_N)
    return SiteGradient({slot: part}, {}, params, SAMPLES, sent={"w": sent})


def by_hand(gradient):
    """Gradients of each sample, one by one."""
    (part,) = gradient.rows.values()
    d, a, of = part.factors.d_GRO[0], part.factors.a_GRI[0], part.samples_N
    whole = [d[of == b].T @ a[of == b] for b in range(SAMPLES)]
    return whole, [d[of == b].sum(0) for b in range(SAMPLES)]


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("make", PROJECTIONS.values(), ids=PROJECTIONS)
def test_norms_are_of_what_is_sent_and_of_all_of_the_bias(make, rows):
    torch.manual_seed(rows)
    sent = make()
    gradient = site_gradient(rows, sent)
    pairs = zip(*by_hand(gradient), strict=True)
    expected = torch.stack([torch.hypot(sent.coordinates(w).norm(), b.norm()) for w, b in pairs])
    torch.testing.assert_close(sample_norms(gradient), expected)


@pytest.mark.parametrize("make", PROJECTIONS.values(), ids=PROJECTIONS)
def test_a_projection_keeps_what_it_sends_and_nothing_else(make):
    torch.manual_seed(0)
    sent, matrix = make(), torch.randn(OUTPUTS, INPUTS)
    kept = sent.matrix(sent.coordinates(matrix))
    torch.testing.assert_close(sent.coordinates(kept), sent.coordinates(matrix))
    assert float(kept.norm()) == pytest.approx(float(sent.coordinates(matrix).norm()), rel=1e-5)
    torch.testing.assert_close(float((kept * (matrix - kept)).sum()), 0.0, atol=1e-5, rtol=0)


class Silent:
    """A source that leaves its noise out."""

    def draw(self, count, device):
        return torch.zeros(count)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("make", PROJECTIONS.values(), ids=PROJECTIONS)
def test_one_sample_changes_what_is_sent_by_the_clip_at_most(make, clipping):
    """Whatever else its gradient has; the sum of all is that of the clipped ones, by hand."""
    torch.manual_seed(1)
    sent, private = make(), og.Private(**(PRIVATE | {"batch": 1, "clipping": clipping}))
    object.__setattr__(private, "_source", Silent())
    gradient = site_gradient(3, sent)
    found = private(gradient).formed
    total_w, total_b = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS)
    for w, b in zip(*by_hand(gradient), strict=True):
        size = SAMPLES * torch.hypot(sent.coordinates(w).norm(), b.norm())
        assert size > CLIP
        factor = SAMPLES * CLIP / (size + 0.01 if clipping == "automatic" else size)
        total_w += factor * sent.matrix(sent.coordinates(w))
        total_b += factor * b
    torch.testing.assert_close(found["w"], total_w, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found["b"], total_b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", PROJECTIONS.values(), ids=PROJECTIONS)
def test_noise_is_in_what_is_sent_alone_and_has_its_variance_there(make):
    torch.manual_seed(2)
    sent, private = make(), og.Private(**(PRIVATE | {"batch": 1}))
    empty = site_gradient(1, sent)
    rows = {s: SampleRows(_first(p.factors), p.samples_N[:0]) for s, p in empty.rows.items()}
    empty = SiteGradient(rows, {}, empty.params, 0, sent={"w": sent})
    drawn = [private(empty).formed["w"] for _ in range(400)]
    numbers = torch.stack([sent.coordinates(w) for w in drawn])
    squares, count = float(numbers.square().sum()) / (SIGMA * CLIP) ** 2, numbers.numel()
    assert abs(squares - count) < 5 * math.sqrt(2 * count)
    for w in drawn[:5]:
        torch.testing.assert_close(sent.matrix(sent.coordinates(w)), w, atol=1e-5, rtol=1e-5)


def _first(factors):
    return Factors(factors.d_GRO[:, :0], factors.a_GRI[:, :0])


# -- in a session ---------------------------------------------------------------------------------

METHODS = {
    "alternate": og.RankDAD(rank=2, reduce="alternate", error_feedback=None),
    "entries": og.Sparse(density=0.1, select="random", error_feedback=False),
    "blocks": og.Sparse(density=0.1, select="random_blocks", block=8, error_feedback=False),
}


class Watched:
    """A `Private` whose inputs and results are kept."""

    needs_samples = needs_all_layers = forms = adds_up = sent_only = True

    def __init__(self, inner):
        self._inner, self.given, self.returned = inner, [], []

    def __repr__(self):
        return repr(self._inner)

    def __call__(self, gradient):
        found = self._inner(gradient)
        self.given.append(gradient)
        self.returned.append({name: g.clone() for name, g in found.formed.items()})
        return found


def trained(sites, method, private, steps=4, model=None):
    torch.manual_seed(0)
    whole = model or mlp(40, 48, 32)

    def body(rank, group):
        own, watched = copy.deepcopy(whole), Watched(private(rank))
        session = og.distribute(own, method, group=group, transform=watched, buffers="local")
        optimizer, x = (
            torch.optim.SGD(own.parameters(), lr=0.1),
            torch.Generator().manual_seed(rank),
        )
        applied = []
        for _ in range(steps):
            optimizer.zero_grad()
            own(torch.randn(4, *shape, generator=x)).square().mean().backward()
            applied.append({n: p.grad.clone() for n, p in own.named_parameters()})
            optimizer.step()
        session.detach()
        return watched, applied

    shape = (40,) if model is None else (3, 8, 8)
    return run_on_lasting_groups(sites, body)


def conv():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 12))


def normed():
    """A norm's weight is a vector, and a tied one is fed by two slots: both are clipped whole."""
    first = nn.Linear(192, 96)
    second = nn.Linear(96, 192)
    second.weight = nn.Parameter(torch.randn(192, 96) / 10)
    third = nn.Linear(96, 192)
    third.weight = second.weight
    layers = [nn.Flatten(), first, nn.LayerNorm(96), second, nn.ReLU(), nn.Linear(192, 96), third]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("model", [None, conv(), normed()], ids=["mlp", "conv", "normed"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_what_is_clipped_and_noisy_is_what_arrives(method, model):
    """The method loses nothing of it, and noise in all other directions is not needed."""
    found = trained(2, method, lambda rank: og.Private(**PRIVATE), model=model)
    for step in range(1, 4):
        sent = found[0][0].given[step].sent
        assert len(sent) >= 1 + (method == METHODS["blocks"])
        for name in sent:
            mean = sum(watched.returned[step][name] for watched, _ in found) / 2
            torch.testing.assert_close(found[0][1][step][name], mean, atol=1e-5, rtol=1e-4)
            assert bool(mean.any())
        for name, projection in sent.items():  # alike on all sites
            other = found[1][0].given[step].sent[name]
            matrix = torch.randn_like(found[0][1][step][name]).flatten(1)
            assert torch.equal(projection.coordinates(matrix), other.coordinates(matrix))


def test_first_step_of_directions_that_nobody_knows_yet_is_of_whole_gradients():
    found = trained(2, METHODS["alternate"], lambda rank: og.Private(**PRIVATE), steps=2)
    assert not found[0][0].given[0].sent
    assert found[0][0].given[1].sent


def test_what_travels_dense_is_clipped_whole():
    method = og.Sparse(density=1.0, select="random", error_feedback=False)
    found = trained(2, method, lambda rank: og.Private(**PRIVATE), steps=2)
    assert not any(given.sent for given in found[0][0].given)


REFUSED = {
    "dense": og.Dense(),
    "two rounds": og.RankDAD(reduce="all_reduce", error_feedback=None),
    "powersgd": og.PowerSGD(error_feedback=False),
    "tolerance": og.RankDAD(reduce="alternate", error_feedback=None, tolerance=0.1),
}


@pytest.mark.parametrize("method", REFUSED.values(), ids=REFUSED)
def test_methods_of_which_nothing_is_known_before_are_refused(method):
    def body(rank, group):
        with pytest.raises(ValueError, match=r"sent_only=True, but .* use og.RankDAD\(reduce='alt"):
            og.distribute(mlp(40, 48), method, group=group, transform=og.Private(**PRIVATE))

    run_on_lasting_groups(2, body)


@pytest.mark.parametrize(
    ("about", "name"), [({"noise": 0.0}, "sent_only"), ({"bands": 2}, "bands")]
)
def test_settings_that_do_not_go_with_it_are_refused(about, name):
    with pytest.raises(ValueError, match=f"Private: {name}="):
        og.Private(**(PRIVATE | about))


def test_several_passes_are_refused():
    def body(rank, group):
        torch.manual_seed(0)
        model = mlp(40, 48, 32)
        private = og.Private(**PRIVATE)
        session = og.distribute(model, METHODS["blocks"], group=group, transform=private)
        with pytest.raises(RuntimeError, match="not kept over"), session.no_sync():
            pass
        session.detach()

    run_on_lasting_groups(2, body)
