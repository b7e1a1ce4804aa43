"""Attacks on rows: they find what a gradient has in it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outergrad.tools.audit.attacks.labels import label_counts
from outergrad.tools.audit.attacks.matching import matched
from outergrad.tools.audit.attacks.membership import membership_scores
from outergrad.tools.audit.attacks.rows import alone_rows
from outergrad.tools.audit.attacks.span import span_of
from outergrad.tools.audit.attacks.spear import spear
from outergrad.tools.audit.attacks.tokens import looked_up
from outergrad.tools.audit.figures import auc, nearest, psnr_db, rows_back, ssim

INPUTS, HIDDEN, CLASSES = 60, 200, 10


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(cross_entropy(model(x), y), params)
    return dict(zip(names, found, strict=True))


def batch(rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=drawn)
    return x, torch.randint(CLASSES, (rows,), generator=drawn)


def test_one_row_comes_back_from_its_gradient():
    model, (x, y) = network(), batch(1)
    found = gradients(model, x, y)
    rows = alone_rows(found["0.weight"], found["0.bias"])
    assert len(rows) == 1
    assert float(nearest(rows, x)[1]) < 1e-6


def test_rows_that_units_saw_alone_come_back_and_no_mixtures():
    torch.manual_seed(0)
    model, (x, y) = network(), batch(8)
    with torch.no_grad():
        model.get_parameter("0.bias").sub_(1.0)  # so that few rows turn a unit on
    found = gradients(model, x, y)
    exact, false = rows_back(alone_rows(found["0.weight"], found["0.bias"]), x)
    assert exact >= 6
    assert false == 0


def test_a_batch_that_every_unit_mixes_gives_no_row():
    model, (x, y) = network(), batch(128)
    found = gradients(model, x, y)
    assert len(alone_rows(found["0.weight"], found["0.bias"])) == 0


@pytest.mark.parametrize("rows", [1, 4, 8, 12])
def test_spear_finds_all_rows_of_a_small_batch(rows):
    model, (x, y) = network(), batch(rows)
    found = gradients(model, x, y)
    told = (
        found["0.weight"],
        found["0.bias"],
        model.get_parameter("0.weight").detach(),
        model.get_parameter("0.bias").detach(),
    )
    back = spear(*told, generator=torch.Generator().manual_seed(0))
    assert rows_back(back, x) == (rows, 0)


def first_layer(model: nn.Module, found: dict[str, Tensor]) -> list[Tensor]:
    own = [model.get_parameter(f"0.{name}").detach() for name in ("weight", "bias")]
    return [found["0.weight"], found["0.bias"], *own]


@pytest.mark.parametrize("seed", range(6))
def test_spear_finds_four_rows_that_64_units_saw_though_they_turned_off_unlike_numbers(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    x, y = torch.randn(4, 20), torch.randint(4, (4,))
    told = first_layer(model, gradients(model, x, y))
    assert rows_back(spear(*told, generator=torch.Generator().manual_seed(0)), x) == (4, 0)


def wide_network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Linear(1000, HIDDEN)
    last = nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(nn.Linear(INPUTS, 1000), nn.ReLU(), inner, nn.ReLU(), last)


def test_spear_claims_no_mixture_of_more_rows_of_a_label_than_it_can_tell_apart():
    torch.manual_seed(0)
    shallow = nn.Sequential(nn.Linear(INPUTS, 1000), nn.ReLU(), nn.Linear(1000, CLASSES))
    x, y = batch(24)
    told = first_layer(shallow, gradients(shallow, x, y))
    assert rows_back(spear(*told, generator=torch.Generator().manual_seed(0)), x)[1] == 0


def test_spear_finds_all_of_32_rows_that_a_thousand_units_saw():
    model, (x, y) = wide_network(), batch(32)
    told = first_layer(model, gradients(model, x, y))
    assert rows_back(spear(*told, generator=torch.Generator().manual_seed(0)), x) == (32, 0)


def test_spear_finds_rows_of_deltas_in_few_bits_but_not_exactly():
    model, (x, y) = wide_network(), batch(8)
    found = gradients(model, x, y)
    deltas_NO = torch.linalg.lstsq(x.T.double(), found["0.weight"].T.double()).solution
    unit_N1 = deltas_NO.abs().amax(dim=1, keepdim=True) / 127
    coarse_NO = (deltas_NO / unit_N1).round() * unit_N1
    found |= {"0.weight": coarse_NO.T @ x.double(), "0.bias": coarse_NO.sum(dim=0)}
    told = first_layer(model, found)
    back = spear(*told, generator=torch.Generator().manual_seed(0))
    assert rows_back(back, x, within=5e-2) == (8, 0)


def test_spear_claims_nothing_of_shuffled_weights():
    model, (x, y) = wide_network(), batch(8)
    weight, bias, own, own_bias = first_layer(model, gradients(model, x, y))
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0))
    back = spear(weight, bias, own[order], own_bias, generator=torch.Generator().manual_seed(0))
    assert len(back) == 0


def test_noise_has_no_rows():
    drawn = torch.Generator().manual_seed(0)
    weight, bias = (
        torch.randn(HIDDEN, INPUTS, generator=drawn),
        torch.randn(HIDDEN, generator=drawn),
    )
    model = network()
    own = model.get_parameter("0.weight").detach(), model.get_parameter("0.bias").detach()
    assert len(alone_rows(weight, bias)) == 0
    assert len(spear(weight, bias, *own, generator=drawn)) == 0
    low = torch.randn(HIDDEN, 6, generator=drawn) @ torch.randn(6, INPUTS, generator=drawn)
    assert len(spear(low, bias, *own, rounds=2, generator=drawn)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_labels_of_32_rows_are_counted_with_repeats(seed):
    model, (x, y) = network(seed), batch(32, seed)
    found = gradients(model, x, y)
    last = model.get_parameter("2.weight").detach(), model.get_parameter("2.bias").detach()
    counts = label_counts(*last, found["2.weight"], found["2.bias"], 32)
    assert counts.tolist() == torch.bincount(y, minlength=CLASSES).tolist()


def test_labels_of_noise_are_as_good_as_guesses():
    drawn, hits = torch.Generator().manual_seed(0), []
    model = network()
    for seed in range(200):
        _, y = batch(1, seed)
        noise = torch.randn(CLASSES, HIDDEN, generator=drawn), torch.randn(CLASSES, generator=drawn)
        last = model.get_parameter("2.weight").detach(), model.get_parameter("2.bias").detach()
        hits.append(bool(label_counts(*last, *noise, 1)[y]))
    assert sum(hits) / len(hits) < 0.2  # chance is 0.1, with a deviation of 0.021


def test_members_are_in_the_span_and_planted_canaries_are_not():
    model, (x, y) = network(), batch(32)
    canaries, _ = batch(1000, seed=2)
    span = span_of(gradients(model, x, y)["0.weight"])
    assert len(span.basis_RI) == 32
    assert bool(span.contains(x).all())
    assert not bool(span.contains(canaries).any())


def test_a_span_of_everything_contains_nothing():
    model, (x, y) = network(), batch(128)
    span = span_of(gradients(model, x, y)["0.weight"])
    assert not span.is_telling
    assert not bool(span.contains(x).any())


def test_a_gradient_of_zeros_tells_nothing():
    zeros = torch.zeros(HIDDEN, INPUTS)
    model = network()
    own = model.get_parameter("0.weight").detach(), model.get_parameter("0.bias").detach()
    assert len(alone_rows(zeros, torch.zeros(HIDDEN))) == 0
    assert len(spear(zeros, torch.zeros(HIDDEN), *own)) == 0
    assert len(span_of(zeros).basis_RI) == 0
    assert len(looked_up(zeros)) == 0


def test_ids_come_back_from_a_table_that_only_they_touch():
    table, head = nn.Embedding(50, 8), nn.Linear(8, 3)
    ids = torch.tensor([[3, 7, 7], [9, 1, 3]])
    (found,) = torch.autograd.grad(head(table(ids)).square().mean(), [table.weight])
    assert looked_up(found).tolist() == [1, 3, 7, 9]
    assert looked_up(found + 1e-3 * torch.randn(50, 8)).tolist() == []


def test_membership_is_told_by_a_gradient_and_by_chance_in_noise():
    model, (x, y) = network(), batch(16)
    released = gradients(model, x, y)
    others, labels = batch(100, seed=3)
    own = [gradients(model, a[None], b[None]) for a, b in zip(x, y, strict=True)]
    foreign = [gradients(model, a[None], b[None]) for a, b in zip(others, labels, strict=True)]
    assert auc(membership_scores(released, own), membership_scores(released, foreign)) > 0.95
    drawn = torch.Generator().manual_seed(0)
    noise = {n: torch.randn(g.shape, generator=drawn) for n, g in released.items()}
    by_chance = auc(membership_scores(noise, own), membership_scores(noise, foreign))
    assert abs(by_chance - 0.5) < 3 * (1 / 12 / 16 * 1.2) ** 0.5


def test_matching_moves_inputs_towards_the_truth():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(512, 4)
    )
    x, y = torch.rand(1, 1, 8, 8), torch.tensor([2])
    found = gradients(model, x, y)

    def loss(output: Tensor) -> Tensor:
        return cross_entropy(output, y)

    drawn = torch.Generator().manual_seed(0)
    back = matched(model, found, (1, 1, 8, 8), loss, steps=400, variation=0.0, generator=drawn)
    start = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert psnr_db(back, x) > psnr_db(start, x) + 10


def test_figures_of_the_truth_itself():
    x, _ = batch(4)
    image = torch.rand(3, 16, 16)
    assert rows_back(x, x) == (4, 0)
    assert rows_back(torch.cat([x[:2], 2 * x[2:]]), x) == (2, 2)
    assert rows_back(x[:0], x) == (0, 0)
    assert ssim(image, image) == pytest.approx(1.0)
    assert ssim(image.flip(-1), image) < 0.5
    assert psnr_db(image, image) == float("inf")
    assert auc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1.0
    assert auc(torch.zeros(2), torch.zeros(3)) == 0.5
