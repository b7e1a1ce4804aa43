"""Norms and multiples by sample equal those of the gradients that are formed for each."""

from __future__ import annotations

import pytest
import torch

import outergrad as og
from outergrad.core.transform import Samples
from outergrad.linalg.site_gradient import sample_of_rows
from outergrad.transforms import formed, norm, sample_norms, scaled, scaled_samples

B = 4
PLAIN = og.Slot("a", "a.weight", 3, 5, bias="a.bias")
TALL = og.Slot("a", "a.weight", 30, 50)
GROUPS = og.Slot("c", "c.weight", 2, 5, bias="c.bias", groups=3)
LOOKUP = og.Slot("e", "e.weight", 3, 7, lookup=True)
FIRST = og.Slot("q", "q.weight", 2, 5, bias="q.bias", weight_rows=(0, 2), bias_rows=(0, 2))
OTHER = og.Slot("q", "q.weight", 3, 5, bias="q.bias", weight_rows=(2, 5), bias_rows=(2, 5))
BOTH = og.Slot("q", "q.weight", 5, 5, bias="q.bias")
HEAD = og.Slot("h", "e.weight", 7, 3)
SHARED_BIAS = og.Slot("b", "b.weight", 3, 5, bias="a.bias")
SLOTS = {
    "plain": [PLAIN],
    "gram": [TALL],
    "groups": [GROUPS],
    "lookup": [LOOKUP],
    "parts of a weight": [FIRST, OTHER],
    "parts and the whole": [FIRST, OTHER, BOTH],
    "tied": [LOOKUP, HEAD],
    "one bias": [PLAIN, SHARED_BIAS],
    "several": [PLAIN, LOOKUP, FIRST, OTHER],
}
SHAPES = {
    "a.weight": (3, 5),
    "a.bias": (3,),
    "b.weight": (3, 5),
    "c.weight": (6, 5),
    "c.bias": (6,),
    "e.weight": (7, 3),
    "q.weight": (5, 5),
    "q.bias": (5,),
}


def drawn(slot: og.Slot, counts: list[int]) -> og.SampleRows:
    """Rows in any order; of an id several."""
    samples_N = torch.arange(B).repeat_interleave(torch.tensor(counts))
    samples_N = samples_N[torch.randperm(len(samples_N))]
    rows = len(samples_N)
    d = torch.randn(slot.groups, rows, slot.outputs, dtype=torch.float64)
    a = torch.randn(slot.groups, rows, slot.inputs, dtype=torch.float64)
    ids = torch.randint(0, 3, (rows,))
    return og.SampleRows(og.Factors(d, ids if slot.lookup else a), samples_N)


def gradient_of(slots: list[og.Slot], counts: list[int]) -> og.SiteGradient:
    shapes = {**SHAPES, "a.weight": (30, 50)} if slots == [TALL] else SHAPES
    names = {name for slot in slots for name in slot.params}
    params = {n: torch.zeros(shapes[n], dtype=torch.float64) for n in sorted(names)}
    return og.SiteGradient({slot: drawn(slot, counts) for slot in slots}, {}, params, B)


def of_sample(gradient: og.SiteGradient, b: int) -> og.SiteGradient:
    only = torch.zeros(B, dtype=torch.float64)
    only[b] = 1
    return formed(scaled_samples(gradient, only))


@pytest.mark.parametrize(
    "counts", [[1, 1, 1, 1], [3, 3, 3, 3], [9, 9, 9, 9], [2, 0, 5, 1]], ids=str
)
@pytest.mark.parametrize("name", SLOTS)
def test_norms_by_sample(name, counts):
    gradient = gradient_of(SLOTS[name], counts)
    expected = torch.stack([norm(of_sample(gradient, b)) for b in range(B)])
    torch.testing.assert_close(sample_norms(gradient), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SLOTS)
def test_samples_add_up(name):
    gradient = gradient_of(SLOTS[name], [2, 2, 2, 2])
    parts = [of_sample(gradient, b).formed for b in range(B)]
    for parameter, whole in formed(gradient).formed.items():
        torch.testing.assert_close(sum(part[parameter] for part in parts), whole)


@pytest.mark.parametrize("name", SLOTS)
def test_multiples_of_rows_are_those_of_the_product(name):
    gradient = gradient_of(SLOTS[name], [2, 2, 2, 2])
    whole, third = formed(gradient).formed, formed(scaled(gradient, torch.tensor(1 / 3))).formed
    for parameter, part in third.items():
        torch.testing.assert_close(3 * part, whole[parameter], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        norm(gradient), torch.cat([g.flatten() for g in whole.values()]).norm()
    )


def test_norms_without_rows_are_zero():
    gradient = gradient_of([PLAIN, LOOKUP], [0, 0, 0, 0])
    assert torch.equal(sample_norms(gradient), torch.zeros(B, dtype=torch.float64))
    assert not norm(gradient)


@pytest.mark.parametrize("use", [sample_norms, lambda g: scaled_samples(g, torch.ones(B))])
def test_samples_that_are_not_known(use):
    gradient = gradient_of([PLAIN], [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"'a.bias'|'a.weight'"):
        use(formed(gradient))
    rows = {slot: part._replace(samples_N=None) for slot, part in gradient.rows.items()}
    with pytest.raises(ValueError, match=r"'a.weight'.*needs_samples"):
        use(og.SiteGradient(rows, {}, gradient.params, B))


@pytest.mark.parametrize(
    ("first", "expected"), [(False, [0, 0, 0, 1, 1, 1]), (True, [0, 1, 0, 1, 0, 1])]
)
def test_where_samples_stand(first, expected):
    assert sample_of_rows(Samples(2, first, 0), 6, torch.device("cpu")).tolist() == expected


def test_no_samples_have_no_rows():
    assert sample_of_rows(Samples(0, False, 0), 0, torch.device("cpu")).tolist() == []
