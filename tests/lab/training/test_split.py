from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import Dataset
from outergrad_lab.training.split import (
    SPLITS,
    Batches,
    PoissonBatches,
    batch_sizes,
    class_split,
    even_split,
    full_batches,
    speaker_split,
    unequal_split,
)


def labelled(labels: torch.Tensor, groups: torch.Tensor | None = None) -> Dataset:
    x = torch.zeros(len(labels), 2)
    return Dataset(
        x_train=x, y_train=labels, x_test=x, y_test=labels, classes=10, groups_train=groups
    )


LABELS = torch.arange(103) % 10
SPEAKERS = torch.arange(103) * 7 % 13
DATA = labelled(LABELS, SPEAKERS)
TEXTS = labelled(torch.zeros(8, 5, dtype=torch.int64))


@pytest.mark.parametrize("sites", [1, 2, 3, 10])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_row_belongs_to_one_site(split, sites):
    rows = torch.cat(split(DATA, sites, 0))
    assert rows.sort().values.equal(torch.arange(len(LABELS)))


def test_two_sites_hold_five_classes_each():
    first, second = class_split(DATA, 2, 0)
    assert set(LABELS[first].tolist()) == {0, 1, 2, 3, 4}
    assert set(LABELS[second].tolist()) == {5, 6, 7, 8, 9}


def test_more_sites_than_classes_are_refused():
    with pytest.raises(RecipeError, match="10 classes are too few for 11 sites"):
        class_split(DATA, 11, 0)


@pytest.mark.parametrize("split", ["class", "unequal"])
def test_texts_have_no_classes_to_be_split_by(split):
    with pytest.raises(RecipeError, match=f"--split {split} needs .*: use --split even"):
        SPLITS[split](TEXTS, 2, 0)


@pytest.mark.parametrize("sites", [2, 5, 13])
def test_a_speaker_is_at_one_site_beside_its_neighbours(sites):
    groups = [set(SPEAKERS[rows].tolist()) for rows in speaker_split(DATA, sites, 0)]
    assert sorted(speaker for group in groups for speaker in group) == list(range(13))
    assert all(max(group) - min(group) == len(group) - 1 for group in groups)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_rows_must_have_speakers_enough():
    with pytest.raises(RecipeError, match="13 are too few for 14 sites"):
        speaker_split(DATA, 14, 0)
    with pytest.raises(RecipeError, match="--split speaker needs --data spoken-digits: use"):
        speaker_split(TEXTS, 2, 0)


@pytest.mark.parametrize("sites", [2, 4, 6])
@pytest.mark.parametrize("classes", [2, 4, 10])
def test_an_unequal_split_halves_and_mixes(sites, classes):
    labels = torch.randint(classes, (6000,), generator=torch.Generator().manual_seed(classes))
    rows_by_site = unequal_split(labelled(labels), sites, 0)
    rows = torch.tensor([float(len(rows)) for rows in rows_by_site])
    assert (rows[:-1] / rows[1:] - 2).abs().max() < 0.05
    counts = torch.stack([labels[rows].bincount(minlength=classes) for rows in rows_by_site])
    odd = (torch.arange(sites)[:, None] + torch.arange(classes)) % 2 == 1
    often, seldom = (counts.masked_fill(mask, 0).sum(dim=1) for mask in (odd, ~odd))
    assert (often > 1.5 * seldom).all()
    assert counts.sum(dim=0).equal(labels.bincount())


def test_a_seed_decides_an_unequal_split():
    first, second, other = (unequal_split(DATA, 3, seed) for seed in (1, 1, 2))
    assert all(one.equal(two) for one, two in zip(first, second, strict=True))
    assert not all(one.equal(two) for one, two in zip(first, other, strict=True))
    assert [len(rows) for rows in first] == [len(rows) for rows in other]


def test_an_even_split_is_even_shuffled_and_repeatable():
    sizes = [len(rows) for rows in even_split(DATA, 4, 0)]
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat(even_split(DATA, 4, 1)).equal(torch.cat(even_split(DATA, 4, 1)))
    assert not torch.cat(even_split(DATA, 4, 1)).equal(torch.cat(even_split(DATA, 4, 2)))


def batches(*sites: int, steps: int = 3, sizes: tuple[int, ...] = (8, 8, 8)) -> Batches:
    return Batches(
        x=torch.arange(103.0)[:, None],
        y=LABELS,
        rows_by_site=even_split(DATA, 3, 0),
        sites=sites,
        batch_sizes=sizes,
        steps=steps,
        seed=5,
    )


@pytest.mark.parametrize("sizes", [(8, 8, 8), (11, 5, 2)])
def test_a_pooled_batch_is_the_union_of_the_sites_batches(sizes):
    pooled = [x for x, _ in batches(0, 1, 2, sizes=sizes).epoch(4)]
    by_site = [[x for x, _ in batches(site, sizes=sizes).epoch(4)] for site in range(3)]
    assert [len(parts[0]) for parts in by_site] == list(sizes)
    assert len(pooled) == 3
    for union, parts in zip(pooled, zip(*by_site, strict=True), strict=True):
        assert union.equal(torch.cat(parts))


def test_a_row_comes_at_most_once_in_an_epoch_with_its_class():
    seen = list(batches(1, steps=4).epoch(0))
    rows = torch.cat([x for x, _ in seen]).flatten().long()
    assert len(rows.unique()) == len(rows) == 32
    assert torch.cat([y for _, y in seen]).equal(LABELS[rows])


def test_epochs_differ_in_order():
    (first, *_), (second, *_) = ([x for x, _ in batches(0).epoch(number)] for number in (0, 1))
    assert not first.equal(second)


def test_batches_go_on_forever_epoch_after_epoch():
    expected = [x for number in range(3) for x, _ in batches(0).epoch(number)]
    found = [x for x, _ in islice(batches(0).forever(), len(expected))]
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def test_batches_have_the_shape_of_the_rows():
    images = replace(batches(0), x=torch.randn(103, 3, 4, 4), y=torch.zeros(103, 7))
    x, y = next(images.forever())
    assert (x.shape, y.shape) == ((8, 3, 4, 4), (8, 7))


def test_losses_of_larger_batches_weigh_more():
    assert [batches(site).weight for site in range(3)] == [1, 1, 1]
    weights = [batches(site, sizes=(11, 5, 2)).weight for site in range(3)]
    assert weights == pytest.approx([11 / 6, 5 / 6, 2 / 6])
    assert batches(0, 1, 2, sizes=(11, 5, 2)).weight == 1


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_batches_of_unequal_sites_make_the_same_number_of_steps(sites):
    rows_by_site = unequal_split(labelled(torch.arange(20_000) % 10), sites, 0)
    sizes = batch_sizes("unequal", rows_by_site, 32)
    assert sum(sizes) == 32 * sites
    steps = [len(rows) / size for rows, size in zip(rows_by_site, sizes, strict=True)]
    assert max(steps) / min(steps) < 1.1
    assert batch_sizes("even", rows_by_site, 32) == [32] * sites


def test_a_site_whose_batch_would_be_empty_is_named():
    with pytest.raises(RecipeError, match="--batch-size 1 leaves site 3 of --split unequal"):
        batch_sizes("unequal", unequal_split(DATA, 4, 0), 1)


def test_the_site_with_the_fewest_batches_sets_the_steps():
    rows_by_site = [torch.arange(50), torch.arange(33), torch.arange(40)]
    assert full_batches(rows_by_site, (8, 8, 8)) == 4
    assert full_batches(rows_by_site, (25, 8, 8)) == 2


def test_a_site_that_cannot_fill_a_batch_is_named():
    with pytest.raises(RecipeError, match="site 1 has 7 rows, too few for --batch-size 8"):
        full_batches([torch.arange(50), torch.arange(7)], (8, 8))


def poisson(sites, steps=50):
    rows = even_split(DATA, 2, 0)
    x = torch.arange(len(LABELS))
    about = {"batch_sizes": [10, 10], "steps": steps, "seed": 3, "rate": 0.2}
    return PoissonBatches(x=x, y=LABELS, rows_by_site=rows, sites=sites, **about)


def test_poisson_batches_of_several_sites_are_the_unions_of_theirs():
    both, *each = (poisson(sites) for sites in ([0, 1], [0], [1]))
    for (x, y), *parts in zip(both.epoch(2), *(one.epoch(2) for one in each), strict=True):
        assert x.equal(torch.cat([part for part, _ in parts]))
        assert y.equal(LABELS[x])


def test_poisson_batches_have_each_row_at_the_rate_and_differ():
    batches = [x for number in range(4) for x, _ in poisson([0, 1]).epoch(number)]
    counts = torch.cat(batches).bincount(minlength=len(LABELS))
    assert counts.sum() / (200 * len(LABELS)) == pytest.approx(0.2, abs=0.01)
    assert counts.min() > 20
    assert len({len(x) for x in batches}) > 5
    assert all(len(x.unique()) == len(x) for x in batches)


def test_poisson_batches_go_on_within_an_epoch():
    whole, rest = [*poisson([0]).epoch(1)], [*poisson([0]).epoch(1, start=30)]
    assert len(rest) == 20
    for (expected, _), (found, _) in zip(whole[30:], rest, strict=True):
        assert found.equal(expected)
