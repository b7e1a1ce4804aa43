from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch

from outergrad.recipes.errors import RecipeError
from outergrad.recipes.split import SPLITS, Batches, class_split, even_split, full_batches

LABELS = torch.arange(103) % 10


@pytest.mark.parametrize("sites", [1, 2, 3, 10])
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_every_row_belongs_to_one_site(split, sites):
    rows = torch.cat(split(LABELS, sites, 0))
    assert rows.sort().values.equal(torch.arange(len(LABELS)))


def test_two_sites_hold_five_classes_each():
    first, second = class_split(LABELS, 2, 0)
    assert set(LABELS[first].tolist()) == {0, 1, 2, 3, 4}
    assert set(LABELS[second].tolist()) == {5, 6, 7, 8, 9}


def test_more_sites_than_classes_are_refused():
    with pytest.raises(RecipeError, match="10 classes are too few for 11 sites"):
        class_split(LABELS, 11, 0)


def test_texts_have_no_classes_to_be_split_by():
    with pytest.raises(RecipeError, match=r"--split class needs .*: use --split even"):
        class_split(torch.zeros(8, 5, dtype=torch.int64), 2, 0)


def test_an_even_split_is_even_shuffled_and_repeatable():
    sizes = [len(rows) for rows in even_split(LABELS, 4, 0)]
    assert max(sizes) - min(sizes) <= 1
    assert torch.cat(even_split(LABELS, 4, 1)).equal(torch.cat(even_split(LABELS, 4, 1)))
    assert not torch.cat(even_split(LABELS, 4, 1)).equal(torch.cat(even_split(LABELS, 4, 2)))


def batches(*sites: int, steps: int = 3) -> Batches:
    return Batches(
        x=torch.arange(103.0)[:, None],
        y=LABELS,
        rows_by_site=even_split(LABELS, 3, 0),
        sites=sites,
        batch_size=8,
        steps=steps,
        seed=5,
    )


def test_a_pooled_batch_is_the_union_of_the_sites_batches():
    pooled = [x for x, _ in batches(0, 1, 2).epoch(4)]
    by_site = [[x for x, _ in batches(site).epoch(4)] for site in range(3)]
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


def test_the_site_with_the_fewest_rows_sets_the_steps():
    assert full_batches([torch.arange(50), torch.arange(33), torch.arange(40)], 8) == 4


def test_a_site_that_cannot_fill_a_batch_is_named():
    with pytest.raises(RecipeError, match="site 1 has 7 rows, too few for --batch-size 8"):
        full_batches([torch.arange(50), torch.arange(7)], 8)
