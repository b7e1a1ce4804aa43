"""The tap tells what travels: the library's own decoding of each message, before it is summed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.core.sent import Kind, Sent
from outergrad.launch.errors import RecipeError
from outergrad.linalg.gradients import as_tensor
from outergrad.tools.audit.observed import LOCAL_LR, Asked, Tapped, observed
from outergrad.tools.audit.observers import Observers
from outergrad.tools.audit.view import View, is_summed, masked, reaching, summed, view_of
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
    _, mean, sent_S = shared(name)
    params = dict(network().named_parameters())
    last_S = [[one for one in sent if one.kind != Kind.SKETCH] for sent in sent_S]
    total = summed([view_of(sent, params) for sent in last_S])
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


@pytest.mark.parametrize("k", [1, 4, 16])
def test_changes_of_local_steps_are_told_as_mean_gradients(k):
    model, asked = network(), Asked.of(f"local-steps:k={k}")
    assert asked.steps == k
    batches_S = [[rows(k * site + step) for step in range(k)] for site in range(SITES)]
    before = copy.deepcopy(model.state_dict())
    view = view_of(observed(model, asked, batches_S)[0], dict(model.named_parameters()))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    walked, sums = copy.deepcopy(model), {n: torch.zeros_like(t) for n, t in before.items()}
    for x, y in batches_S[0]:
        found = torch.autograd.grad(cross_entropy(walked(x), y), [*walked.parameters()])
        with torch.no_grad():
            for (n, p), g in zip(walked.named_parameters(), found, strict=True):
                sums[n] += g
                p -= LOCAL_LR * g
    for param, found in view.gradients.items():
        assert largest_error(found, sums[param] / k) < 1e-3  # the rounding of weights


def test_the_first_sketch_adds_to_what_the_last_one_tells():
    """Both are linear functions of the gradient, and the view is the smallest that has both."""
    _, _, sent_S = shared("rank-dad:rank=2:reduce=all_reduce:error_feedback=None")
    params = dict(network().named_parameters())
    for site, sent in enumerate(sent_S):
        own = own_gradients(network(), site)["2.weight"].double()
        told = {one.kind: one for one in sent if one.name == "2.weight"}
        first, last = (as_tensor(told[k].content)[0].double() for k in (Kind.SKETCH, Kind.GRADIENT))
        both = view_of(sent, params).gradients["2.weight"].double()
        only = view_of([told[Kind.GRADIENT]], params).gradients["2.weight"].double()
        assert torch.linalg.matrix_rank(both, rtol=1e-4) > torch.linalg.matrix_rank(only, rtol=1e-4)
        assert (both - own).norm() < (only - own).norm()
        right = torch.linalg.svd(first)[2][:2].T  # directions of the first, and of the last
        left = torch.linalg.svd(last)[0][:, :2]
        torch.testing.assert_close(both @ right, own @ right, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(left.T @ both, left.T @ own, rtol=1e-3, atol=1e-6)


def test_the_last_delta_of_a_block_has_the_labels_in_its_signs():
    (view, *_), _, _ = shared("edad:always=True")
    ((delta,),) = view.deltas.values()
    _, y = rows(0)
    assert delta.shape == (4, 5)
    assert torch.equal((delta < 0).int(), nn.functional.one_hot(y, 5).int())


def test_running_statistics_are_seen():
    model = nn.Sequential(nn.Linear(30, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    batches_S = [[rows(site)] for site in range(SITES)]
    view = view_of(observed(model, Asked.of("dense"), batches_S)[0], dict(model.named_parameters()))
    mean = model[0](rows(0)[0]).mean(0)
    torch.testing.assert_close(view.buffers["1.running_mean"], 0.1 * mean)
    assert "1.running_mean" not in view.gradients


TWO_WAY = "rank-dad:rank=4:reduce=two_way:error_feedback=None"


def test_an_owner_has_the_parts_of_its_layers_alone():
    _, _, sent_S = shared(TWO_WAY)
    params = dict(network().named_parameters())
    observers = Observers(sent_S, params)
    whole = observers.part(0).gradients
    seen = [observers.by(reader, 0).gradients for reader in range(SITES)]
    for found in seen:
        for name, gradient in found.items():
            assert torch.equal(gradient, whole[name])
    owned = [name for found in seen for name in found]
    assert sorted(owned) == sorted(whole)  # each layer has one owner


def test_others_have_the_sum_of_all_from_an_owner_less_their_own():
    _, mean, sent_S = shared(TWO_WAY)
    observers = Observers(sent_S, dict(network().named_parameters()))
    reader = SITES - 1
    own, sums = observers.part(reader).gradients, observers.sum_of_others(reader)
    mine = observers.by(reader, 0).gradients
    assert sums.sites == SITES - 1
    others = [name for name in mean if name not in mine]
    assert others
    for name in others:
        assert largest_error(sums.gradients[name] + own[name], SITES * mean[name]) < 1e-4


def test_a_site_has_no_terms_of_sums_of_another():
    assert reaching(shared("dense")[2][0], 1) == []
    everything = shared("dad:always=True")[2][0]
    assert reaching(everything, 1) == everything


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
