"""The tap tells what travels: the library's own decoding of each message, before it is summed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.sent import Sent
from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.observed import Asked, Tapped, observed
from outergrad.tools.audit.view import View, is_summed, masked, summed, view_of
from ranks import run_on_lasting_groups

SITES = 3
EXACT = ["dense", "dad", "dad:always=True", "dad-activations"]
LINEAR = [
    *EXACT,
    "rank-dad:rank=2",
    "rank-dad:rank=2:reduce=all_reduce",
    "rank-dad:rank=2:reduce=alternate",
    "rank-dad:rank=2:reduce=all_reduce:tolerance=0.1",
    "og-powersgd:rank=2",
    "sparse:density=0.1",
    "sparse:density=0.1:select=random",
    "dad:always=True:wire=int8",
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(30, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 5)
    )


def rows(site: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(site + 1)
    x = torch.randn(4, 30, generator=drawn)
    return x, torch.randint(5, (4,), generator=drawn)


def own_gradients(model: nn.Module, site: int) -> dict[str, Tensor]:
    x, y = rows(site)
    params = dict(model.named_parameters())
    found = torch.autograd.grad(cross_entropy(model(x), y), [*params.values()])
    return dict(zip(params, found, strict=True))


def shared(name: str) -> tuple[list[View], dict[str, Tensor], list[list[Sent]]]:
    """Views of all sites in the second step, and the mean gradient that came of it."""
    method = Asked.of(name).attach.method
    models = [network() for _ in range(SITES)]

    def body(rank, group):
        tapped, model = Tapped(), models[rank]
        session = og.distribute(model, method, group=group, tap=tapped)
        for _ in range(2):
            before = len(tapped.kept)
            model.zero_grad()
            x, y = rows(rank)
            cross_entropy(model(x), y).backward()
        session.detach()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return list(tapped.kept[before:]), found

    results = run_on_lasting_groups(SITES, body)
    params = dict(models[0].named_parameters())
    return [view_of(sent, params) for sent, _ in results], results[0][1], [s for s, _ in results]


def largest_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", EXACT)
def test_messages_of_exact_methods_say_this_sites_gradient(name):
    views, _, _ = shared(name)
    for site, view in enumerate(views):
        for param, wanted in own_gradients(network(), site).items():
            assert largest_error(view.gradients[param], wanted) < 1e-5


@pytest.mark.parametrize("name", LINEAR)
def test_the_mean_of_what_sites_send_is_what_arrives(name):
    views, mean, _ = shared(name)
    total = summed(views)
    assert total.sites == SITES
    assert mean.keys() == total.gradients.keys()
    for param, arrived in mean.items():
        assert largest_error(total.gradients[param] / SITES, arrived) < 1e-5


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("dense", True),
        ("og-powersgd:rank=2", True),
        ("sparse:select=random", True),
        ("dad:always=True", False),
        ("rank-dad:rank=4:reduce=two_way", False),
    ],
)
def test_it_says_whether_a_site_sends_terms_of_sums_alone(name, sums):
    _, _, sent_S = shared(name)
    assert all(is_summed(sent) is sums for sent in sent_S)


def test_rows_are_seen_where_they_travel_and_not_where_factors_are_canonical():
    (view, *_), _, _ = shared("dad-activations")
    x, _ = rows(0)
    assert torch.equal(view.rows["0.weight"], x)
    for name in ("dad:always=True", "dad:always=True:wire=int8", "rank-dad:rank=2"):
        assert shared(name)[0][0].rows == {}


def test_tensors_of_blocks_are_seen():
    (view, *_), _, _ = shared("edad:always=True")
    x, _ = rows(0)
    hidden = torch.relu(network()[0](x))
    assert any(t.shape == hidden.shape and torch.allclose(t, hidden) for t in view.others)
    assert "0.weight" in view.gradients


def test_changes_of_local_steps_are_told_as_mean_gradients():
    model, asked = network(), Asked.of("local-steps:k=2")
    batches_S = [[rows(2 * site), rows(2 * site + 1)] for site in range(SITES)]
    before = copy.deepcopy(model.state_dict())
    view = view_of(observed(model, asked, batches_S)[0], dict(model.named_parameters()))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    both = [own_gradients(model, site) for site in (0, 1)]
    for param, found in view.gradients.items():
        assert largest_error(found, (both[0][param] + both[1][param]) / 2) < 0.05


def test_masked_parts_are_other_numbers_each_time():
    (view, *_), _, _ = shared("dense")
    one, other = masked(view), masked(view)
    found, again = one.gradients["0.weight"].flatten(), other.gradients["0.weight"].flatten()
    own = view.gradients["0.weight"].flatten()
    for a, b in ((found, again), (found, own)):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / len(own) ** 0.5


def test_methods_that_cannot_be_tapped_are_refused_by_name():
    with pytest.raises(RecipeError, match="dense sends the same"):
        Asked.of("ddp")
    with pytest.raises(RecipeError, match="behind @"):
        Asked.of("dense@much")
