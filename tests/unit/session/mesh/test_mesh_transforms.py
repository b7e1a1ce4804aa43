"""Transforms at sites of several ranks: what a site adds to the mean passes through one, once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from examples.privacy import ClippedSite, Half
from torch import Tensor

import outergrad as og
from by_sample import Gradients, SampleCase, built, by_sample, length, loss_of, times, total
from cases import relative_error
from covering import covering
from meshes import ThreadMesh, run_mesh, try_mesh
from outergrad.core.errors import StepDiscardedError
from outergrad.session.mesh.refusals import of_settings
from outergrad.step.step import SharedStep
from outergrad.transforms import formed

LIMIT = 0.1
"""Below the norms of all sites."""


@dataclass(frozen=True)
class Noisy:
    """A gradient and Gaussian noise, of a generator that no other rank has."""

    deviation: float
    generator: torch.Generator = field(repr=False)
    forms = True
    needs_samples = needs_all_layers = False

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        noisy = {n: g + self._drawn(g) for n, g in formed(gradient).formed.items()}
        return og.SiteGradient({}, noisy, gradient.params)

    def _drawn(self, like: Tensor) -> Tensor:
        return self.deviation * torch.randn(like.shape, generator=self.generator).to(like)


TRANSFORMS: dict[str, Callable[[int], Any]] = {
    "half": lambda rank: Half(),
    "clipped site": lambda rank: ClippedSite(LIMIT),
    "noisy": lambda rank: Noisy(0.1, torch.Generator().manual_seed(rank)),
}
EXPECTED: dict[str, Callable[[Gradients], Gradients]] = {
    "half": lambda gradient: times(0.5, gradient),
    "clipped site": lambda gradient: times(min(1.0, LIMIT / length(gradient)), gradient),
}
METHODS = {
    "dad": og.DAD(),
    "dad forced": og.DAD(always=True, bucket_bytes=1),
    "dense": og.Dense(),
    "rank-dad": og.RankDAD(rank=1000),
    "rank-dad, sketches": og.RankDAD(rank=1000, reduce="all_reduce"),
    "sparse": og.Sparse(density=1.0, always=True),
}
CASES = built()
LINEAR = CASES["linear"]
PAIRS = covering(CASES.keys(), METHODS.keys(), TRANSFORMS.keys(), quick=16, every=8)
Seen = list[Gradients]
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


class Watched:
    """A transform whose doings are kept: what it was given and what it returned, formed."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.given, self.returned = inner, Seen(), Seen()
        self.needs_samples, self.needs_all_layers = False, inner.needs_all_layers
        self.forms = getattr(inner, "forms", False)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __call__(self, gradient: og.SiteGradient) -> og.SiteGradient:
        found = self.inner(gradient)
        for seen, one in ((self.given, gradient), (self.returned, found)):
            seen.append({n: g.clone() for n, g in formed(one).formed.items()})
        return found

    def take(self) -> tuple[Seen, Seen]:
        """Of one step."""
        found = [*self.given], [*self.returned]
        self.given.clear()
        self.returned.clear()
        return found


def gradients_of(model: torch.nn.Module) -> Gradients:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def merged(parts: Sequence[Gradients]) -> Gradients:
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)), "a parameter was transformed twice in a step"
    return {name: g for part in parts for name, g in part.items()}


def check_equal(found: Gradients, expected: Gradients, limit: float = 2e-5) -> None:
    whole = length({n: g.double() for n, g in expected.items()})
    for name, g in expected.items():
        own = found[name].double() if name in found else torch.zeros_like(g.double())
        near = (own - g.double()).norm() < 1e-7 * whole
        assert near or relative_error(own, g.double()) < limit, name


def train(case: SampleCase, method: Any, transform: Callable[[int], Any], steps: int = 3) -> Any:
    """Per rank and step, what its transform was given and returned, and the shared gradients."""

    def body(mesh: ThreadMesh) -> Any:
        model, watched = copy.deepcopy(case.model), Watched(transform(mesh.number))
        about = {"transform": watched, "weighting": "samples", "mesh": mesh}
        session, found = og.distribute(model, method, **about), []
        for _ in range(steps):
            model.zero_grad()
            loss_of(model, case.batches[mesh.site][mesh.local :: mesh.ranks]).backward()
            found.append((*watched.take(), gradients_of(model)))
        session.detach()
        return found

    return run_mesh(2, 2, body)


def site_of(step: Sequence[Any], site: int) -> tuple[Gradients, Gradients]:
    """What its ranks were given and returned; every parameter comes once."""
    ranks = step[2 * site : 2 * site + 2]
    return merged([g for given, _, _ in ranks for g in given]), merged(
        [r for _, returned, _ in ranks for r in returned]
    )


@pytest.mark.parametrize(("name", "method", "label"), PAIRS)
def test_a_site_of_several_ranks_is_one_site(name, method, label):
    """Its transforms see the gradient of all its samples, by parts on one rank each."""
    case, expected = CASES[name], EXPECTED.get(label)
    sizes = [len(x) for x in case.batches]
    own = [total(by_sample(case, site)) for site in range(2)]
    for step in zip(*train(case, METHODS[method], TRANSFORMS[label]), strict=True):
        sites = [site_of(step, site) for site in range(2)]
        for (given, returned), whole in zip(sites, own, strict=True):
            check_equal(given, whole)
            if expected is not None:
                check_equal(returned, expected(whole))
        parts = zip(sizes, sites, strict=True)
        shared = total([times(n / sum(sizes), returned) for n, (_, returned) in parts])
        used = {n for one in own for n, g in one.items() if g.any()}
        for _, _, gradients in step:
            check_equal(gradients, {n: g for n, g in shared.items() if n in used})
            assert set(gradients) <= used


def test_all_layers_are_seen_by_one_rank():
    for rank, steps in enumerate(train(LINEAR, og.DAD(), TRANSFORMS["clipped site"])):
        for given, _, _ in steps:
            assert len(given) == (rank % 2 == 0)


def test_coverage_says_what_is_transformed_and_who_sends_it():
    def body(mesh):
        session = og.distribute(copy.deepcopy(LINEAR.model), mesh=mesh, transform=Half())
        lines = [line.why for line in session.coverage()]
        session.detach()
        return lines

    for lines in run_mesh(2, 2, body):
        assert all("after Half()" in why and "sent by local rank" in why for why in lines)


@pytest.mark.parametrize("label", EXPECTED)  # what returns no rows is surprised by none
def test_a_step_that_starts_again_transforms_once(label, monkeypatch):
    again, start_again = [], SharedStep._start_again
    monkeypatch.setattr(SharedStep, "_start_again", lambda s: (again.append(1), start_again(s)))
    case, rows = CASES["wide"], [4, 4, 4, 7, 7, 2]

    def body(mesh):
        model, found = copy.deepcopy(case.model), []
        watched = Watched(TRANSFORMS[label](mesh.number))
        session = og.distribute(model, og.DAD(), mesh=mesh, transform=watched)
        for n in rows:
            model.zero_grad()
            size = n if mesh.number == 0 else 6
            loss_of(model, torch.linspace(-1, 1, size * 40).view(-1, 40).cos()).backward()
            found.append((*watched.take(), gradients_of(model)))
        session.detach()
        return found

    for step in zip(*run_mesh(2, 2, body), strict=True):
        shared = times(0.5, total([site_of(step, site)[1] for site in range(2)]))
        for _, _, gradients in step:
            check_equal(gradients, shared)
    assert again


def test_a_rank_that_has_run_out_transforms_for_its_site():
    """As long as one of its site has a batch; a whole site that has run out is not asked."""
    steps = [3, 1, 2, 2]

    def body(mesh):
        model, watched = copy.deepcopy(LINEAR.model), Watched(Half())
        session, found = og.distribute(model, og.DAD(), mesh=mesh, transform=watched), []
        with session.join(step=lambda: found.append(gradients_of(model))):
            for _ in range(steps[mesh.number]):
                model.zero_grad()
                loss_of(model, LINEAR.batches[0]).backward()
                found.append(gradients_of(model))
        session.detach()
        return found, len(watched.given)

    results = run_mesh(2, 2, body)
    half = times(0.5, total(by_sample(LINEAR, 0)))
    for found, _ in results:
        for gradients in found:
            check_equal(gradients, half)
    calls = [count for _, count in results]
    params = len(LINEAR.model) // 2 + 1
    assert calls[0] + calls[1] == 3 * params
    assert calls[2] + calls[3] == 2 * params


def test_a_gradient_of_before_is_refused_on_a_rank_that_sends_nothing():
    def body(mesh):
        model = copy.deepcopy(LINEAR.model)
        session = og.distribute(model, og.DAD(), mesh=mesh, transform=ClippedSite(LIMIT))
        if mesh.number == 1:
            next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
        try:
            loss_of(model, LINEAR.batches[0]).backward()
        finally:
            session.detach()

    found = try_mesh(2, 2, body)
    assert "'0.weight' had a gradient before this backward" in str(found[1])
    assert all(isinstance(found[rank], StepDiscardedError) for rank in (0, 2, 3)), found


def test_the_change_of_a_sites_weights_is_clipped():
    """Of `og.LocalSteps`: no longer than the limit, whatever the ranks of a site have done."""

    def body(mesh):
        model, watched = copy.deepcopy(LINEAR.model), Watched(ClippedSite(1e-4))
        session = og.distribute(model, og.LocalSteps(2), mesh=mesh, transform=watched)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, LINEAR.batches[mesh.site]).backward()
            optimizer.step()
        session.detach()
        return watched.returned

    for rank, returned in enumerate(run_mesh(2, 2, body)):
        lengths = [length(gradient) for gradient in returned]
        assert lengths == ([pytest.approx(1e-4)] if rank % 2 == 0 else [])


def test_shards_are_refused():
    """Of `fully_shard`, which has summed them over the site."""
    settings = {"weighting": "sites", "buffers": None, "verify_every": None, "transform": Half()}
    (why,) = of_settings(settings, sharded=True, steps=False)
    assert "none a whole one; use a model that is whole on every rank" in why
    assert not list(of_settings(settings, sharded=False, steps=False))
