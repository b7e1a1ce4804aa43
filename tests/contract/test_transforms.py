"""What holds for every transform of gradients, with every method, against brute force.

A transform of your own goes into `TRANSFORMS`, with what it should make of a site's gradients by
sample, or None where that cannot be known, as with noise.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from examples.privacy import DPSGD, ClippedLayers, ClippedSite, Half
from examples.transposed import Transposed, TransposedRule
from torch import nn

import outergrad as og
from by_sample import Gradients, SampleCase, built, by_sample, length, loss_of, times, total
from cases import relative_error
from covering import covering
from outergrad.step.step import SharedStep
from places import REPOSITORY
from ranks import run_on_lasting_groups

LIMIT = 0.1
"""Below the norms of some samples and of all sites."""


def clipped(limit: float, gradients: Gradients) -> Gradients:
    return times(min(1.0, limit / length(gradients)) if length(gradients) else 1.0, gradients)


def layers_of(gradients: Gradients) -> list[Gradients]:
    """The parameters of one module together."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in gradients)
    return [{n: g for n, g in gradients.items() if n.rpartition(".")[0] == m} for m in modules]


def clipped_layers(samples: Sequence[Gradients]) -> Gradients:
    share = LIMIT / len(samples)
    layers = zip(*(layers_of(sample) for sample in samples), strict=True)
    parts = [total([clipped(share, part) for part in layer]) for layer in layers]
    return {name: g for part in parts for name, g in part.items()}


@dataclass
class Entry:
    """A transform of a site, and what it should make of the site's gradients by sample."""

    transform: Callable[[int], Any]
    expected: Callable[[Sequence[Gradients]], Gradients] | None


def noisy(site: int) -> DPSGD:
    return DPSGD(LIMIT, noise=1.0, generator=torch.Generator().manual_seed(site))


TRANSFORMS = {
    "half": Entry(lambda site: Half(), lambda samples: times(0.5, total(samples))),
    "clipped site": Entry(
        lambda site: ClippedSite(LIMIT), lambda samples: clipped(LIMIT, total(samples))
    ),
    "dp-sgd without noise": Entry(
        lambda site: DPSGD(LIMIT),
        lambda samples: total([clipped(LIMIT / len(samples), one) for one in samples]),
    ),
    "clipped layers": Entry(lambda site: ClippedLayers(LIMIT), clipped_layers),
    "dp-sgd": Entry(noisy, None),
    "private": Entry(
        lambda site: og.Private(clip=LIMIT, noise=0.0, batch=10),
        lambda samples: total(
            [times(len(samples) * 2 / 10, clipped(LIMIT / len(samples), one)) for one in samples]
        ),
    ),
    "private, noisy": Entry(lambda site: og.Private(clip=LIMIT, noise=1.0, batch=10), None),
}
METHODS = {
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True),
    "dad raw, small buckets": og.DAD(always=True, bucket_bytes=1, reveal="activations"),
    "dense": og.Dense(),
    "rank-dad": og.RankDAD(rank=1000),
    "rank-dad, two ways": og.RankDAD(rank=1000, reduce="two_way"),
    "rank-dad, sketches": og.RankDAD(rank=1000, reduce="all_reduce"),
    "powersgd": og.PowerSGD(rank=1000, min_ratio=1),
}
CASES = built()
RECURRENT = "gru", "lstm", "cell"
APART = "norm", "tokens", "positions of all", "bias alone"
"""Cases with modules whose parameters are not of one product."""
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


@dataclass
class Watched:
    """A transform whose doings are kept: what it was given and what it returned, formed."""

    inner: Any
    given: list[Gradients] = field(default_factory=list)
    returned: list[Gradients] = field(default_factory=list)

    def __post_init__(self):
        self.needs_samples = self.inner.needs_samples
        self.needs_all_layers = self.inner.needs_all_layers
        self.forms = getattr(self.inner, "forms", False)

    def __repr__(self):
        return repr(self.inner)

    def __call__(self, gradient):
        self.given.append(copied(gradient))
        found = self.inner(gradient)
        self.returned.append(copied(found))
        return found

    def take(self) -> tuple[Gradients, Gradients]:
        """Of one step; every parameter comes once."""
        steps = [merged(self.given), merged(self.returned)]
        self.given.clear()
        self.returned.clear()
        return steps[0], steps[1]


def copied(gradient: og.SiteGradient) -> Gradients:
    return {n: g.clone() for n, g in og.transforms.formed(gradient).formed.items()}


def merged(parts: Sequence[Gradients]) -> Gradients:
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), "a parameter was transformed twice in a step"
    return {name: g for part in parts for name, g in part.items()}


def train(case: SampleCase, method: Any, transform: Callable[[int], Any], steps: int = 3) -> Any:
    """Per site and step, what the transform was given and returned, and the shared gradients."""

    def body(rank, group):
        model, watched, found = copy.deepcopy(case.model), Watched(transform(rank)), []
        session = og.distribute(model, method, group=group, transform=watched)
        for _ in range(steps):
            model.zero_grad()
            loss_of(model, case.batches[rank]).backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            found.append((*watched.take(), grads))
        session.detach()
        return found

    return run_on_lasting_groups(len(case.batches), body)


def mean(parts: Sequence[Gradients]) -> Gradients:
    return times(1 / len(parts), total(parts))


def check_equal(found: Gradients, expected: Gradients, limit: float = 1e-5) -> None:
    """All that is expected is there, and near; what is not there is zero."""
    whole = length({n: g.double() for n, g in expected.items()})
    for name, g in expected.items():
        if name not in found:
            assert not g.any(), f"{name!r} has no gradient"
            continue
        error = relative_error(found[name], g.double())
        near = (found[name].double() - g.double()).norm() < 1e-7 * whole
        assert error < limit or near, f"{name}: {error:.1e}"


def unfit(name: str, method: str, label: str) -> bool:
    if label == "clipped layers" and name.startswith((*RECURRENT, *APART, "tied")):
        return True  # what is called for at a time is not one module
    return "raw" in method and name.startswith(RECURRENT[:2])


PAIRS = covering(CASES.keys(), METHODS.keys(), TRANSFORMS.keys(), quick=16, every=8)


@pytest.mark.parametrize(("name", "method", "label"), PAIRS)
def test_what_a_transform_is_given_and_returns(name, method, label):
    """It sees the whole of each site's own gradient, once, and what it returns is shared."""
    if unfit(name, method, label):
        pytest.skip("refused, or layers of another kind")
    case, entry = CASES[name], TRANSFORMS[label]
    samples_S = [by_sample(case, site) for site in range(len(case.batches))]
    sites = train(case, METHODS[method], entry.transform)
    for steps in zip(*sites, strict=True):
        for (given, returned, _), samples in zip(steps, samples_S, strict=True):
            check_equal(given, total(samples))
            if entry.expected is not None:
                check_equal(returned, entry.expected(samples))
        shared = mean([returned for _, returned, _ in steps])
        used = {n for samples in samples_S for n, g in total(samples).items() if g.any()}
        for _, _, grads in steps:
            check_equal(grads, {n: g for n, g in shared.items() if n in used}, 2e-5)
            assert set(grads) <= used


@pytest.mark.parametrize(
    ("label", "method"), covering(list(TRANSFORMS), list(METHODS), quick=4, every=2)
)
def test_a_step_that_starts_again_transforms_once(method, label, monkeypatch):
    """What was drawn in the first attempt is what is shared by the second.

    The first site's batches change, which surprises it; the second has sent by then.
    """
    again, start_again = [], SharedStep._start_again
    monkeypatch.setattr(SharedStep, "_start_again", lambda s: (again.append(1), start_again(s)))
    case, entry = CASES["wide"], TRANSFORMS[label]
    sizes = [(4, 6), (4, 6), (4, 6), (7, 6), (7, 6), (2, 6)]

    def body(rank, group):
        model, watched, found = copy.deepcopy(case.model), Watched(entry.transform(rank)), []
        about = {"transform": watched, "weighting": "samples"}
        session = og.distribute(model, METHODS[method], group=group, **about)
        for size in sizes:
            model.zero_grad()
            loss_of(model, torch.linspace(-1, 1, size[rank] * 40).view(-1, 40).cos()).backward()
            found.append((watched.take()[1], {n: p.grad for n, p in model.named_parameters()}))
        session.detach()
        return found

    sites = run_on_lasting_groups(2, body)
    for steps, (n, m) in zip(zip(*sites, strict=True), sizes, strict=True):
        (first, _), (second, _) = steps
        shared = total([times(n / (n + m), first), times(m / (n + m), second)])
        for _, grads in steps:
            check_equal(grads, shared, 2e-5)
    assert again


def test_sites_draw_other_noise_and_keep_replicas_equal():
    sites = train(CASES["linear"], og.DAD(), noisy, steps=1)
    (_, first, shared), (_, second, other) = (steps[0] for steps in sites)
    for name in first:
        assert not torch.allclose(first[name], second[name])
        assert torch.equal(shared[name], other[name])


def documented(heading: str) -> str:
    """The first example below a heading of docs/extending.md."""
    page = (REPOSITORY / "docs" / "extending.md").read_text()
    return re.search(rf"## {heading}\n.*?```python\n(.*?)```", page, re.DOTALL)[1]


def test_the_documented_transform_is_dp_sgd():
    """Less noise than a thousandth of the limit, it is clipping by sample."""
    code, names = documented("A transform"), {}
    assert len(code.splitlines()) < 60
    exec(compile(code.split("session = ")[0], "docs/extending.md", "exec"), names)

    def transform(site):
        return names["DPSGD"](LIMIT, 1e-4, torch.Generator().manual_seed(site))

    case = CASES["linear"]
    entry = TRANSFORMS["dp-sgd without noise"]
    expected = mean([entry.expected(by_sample(case, site)) for site in range(2)])
    for steps in train(case, og.DAD(), transform):
        for _, _, grads in steps:
            check_equal(grads, expected, 0.01)


def test_a_rule_of_ones_own_tells_samples_apart():
    model, rules = nn.Sequential(Transposed(20, 30)), {**og.RULES, Transposed: TransposedRule()}
    case = SampleCase(model, [torch.randn(n, 4, 20) for n in (3, 2)])
    expected = TRANSFORMS["dp-sgd without noise"].expected

    def body(rank, group):
        model = copy.deepcopy(case.model)
        about = {"group": group, "rules": rules, "transform": DPSGD(LIMIT)}
        session = og.distribute(model, og.DAD(always=True), **about)
        loss_of(model, case.batches[rank]).backward()
        session.detach()
        return {n: p.grad for n, p in model.named_parameters()}

    shared = mean([expected(by_sample(case, site)) for site in range(2)])
    for grads in run_on_lasting_groups(2, body):
        check_equal(grads, shared)
