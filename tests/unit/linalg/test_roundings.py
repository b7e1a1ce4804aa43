"""Clipping holds where gradients nearly cancel: norms are exact, and what is formed is no longer.

`gap` is how much is left of each row of one slot beside the opposite row of another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import outergrad as og
from outergrad.linalg.roundings import roundings
from outergrad.linalg.sample_products import as_vectors, products
from outergrad.linalg.sample_sums import weighted_sum
from outergrad.private.clipping import clipped
from outergrad.transforms import norm, sample_norms

B = 16
GAPS = [1.0, 1e-2, 1e-4, 1e-6]
FIRST, SECOND = (og.Slot(layer, "w", 30, 50) for layer in ("a", "b"))
SMALL = [og.Slot(layer, "w", 1, 1) for layer in ("a", "b")]
GROUPS = [og.Slot(layer, "w", 6, 9, groups=3) for layer in ("a", "b")]
TABLE, HEAD = og.Slot("e", "w", 4, 20, lookup=True), og.Slot("h", "w", 20, 4)
VECTORS = [og.Slot(layer, "w", 8, 1, vector=True) for layer in ("a", "b")]
BIASES = [og.Slot(layer, f"{layer}w", 8, 3, bias="w") for layer in ("a", "b")]
KINDS = {
    "tied": ([FIRST, SECOND], 3),
    "tied, many rows": ([FIRST, SECOND], 60),
    "tied numbers": (SMALL, 3),
    "tied groups": (GROUPS, 3),
    "table and head": ([TABLE, HEAD], 3),
    "lookups": ([TABLE, TABLE._replace(layer="f")], 3),
    "vectors": (VECTORS, 3),
    "biases": (BIASES, 3),
    "rows of one slot": ([FIRST], 8),
    "many rows of one slot": ([FIRST], 60),
    "numbers of one slot": (SMALL[:1], 8),
}

SHAPES = {30: (30, 50), 1: (1, 1), 6: (18, 9), 4: (20, 4), 8: (8,)}
"""Of the weight, by the outputs of the first slot."""


def gradient_of(name: str, gap: float, dtype: torch.dtype = torch.float32) -> og.SiteGradient:
    """Of samples whose rows are in pairs of opposite ones, but for the gap."""
    torch.manual_seed(0)
    slots, rows = KINDS[name]
    one, two = slots[0], slots[-1]
    shapes = {"w": SHAPES[one.outputs], "aw": (8, 3), "bw": (8, 3)}
    samples_N = torch.arange(B).repeat_interleave(rows)
    ids_N = torch.randint(0, 20, (len(samples_N),))
    d = torch.randn(one.groups, len(samples_N), one.outputs)
    a = torch.randn(one.groups, len(samples_N), one.inputs)
    if one.vector or one.bias:
        opposite = -d * (1 + gap * torch.rand_like(d)), torch.ones_like(a)
        a = torch.ones_like(a) if one.vector else gap * a
        opposite = (opposite[0], a) if one.bias else opposite
    else:
        opposite = -d, a + gap * torch.randn_like(a)
    parts = [(d, ids_N if one.lookup else a), opposite]
    if two.lookup:
        parts[1] = (-d * (1 + gap * torch.rand_like(d)), ids_N)
    elif one.lookup:  # the head's deltas are one for the id
        one_hot = torch.nn.functional.one_hot(ids_N, 20).to(d)[None]
        parts[1] = (one_hot, -d * (1 + gap * torch.rand_like(d)))
    parts = [(d.to(dtype), a if a.dtype == torch.int64 else a.to(dtype)) for d, a in parts]
    if len(slots) == 1:
        both = og.Factors(*(torch.cat(pair, 1) for pair in zip(*parts, strict=True)))
        rows_of = {one: og.SampleRows(both, torch.cat([samples_N, samples_N]))}
    else:
        rows_of = {
            slot: og.SampleRows(og.Factors(*part), samples_N)
            for slot, part in zip(slots, parts, strict=True)
        }
    names = {name for slot in slots for name in slot.params}
    params = {n: torch.zeros(shapes[n], dtype=dtype) for n in sorted(names)}
    return og.SiteGradient(rows_of, {}, params, B)


def in_float64(gradient: og.SiteGradient) -> og.SiteGradient:
    def exact(slot: og.Slot, part: og.SampleRows) -> og.SampleRows:
        d, a = part.factors.d_GRO.double(), part.factors.a_GRI
        return part._replace(factors=og.Factors(d, a if slot.lookup else a.double()))

    rows = {slot: exact(slot, part) for slot, part in gradient.rows.items()}
    params, formed = (
        {n: p.double() for n, p in t.items()} for t in (gradient.params, gradient.formed)
    )
    return replace(gradient, rows=rows, params=params, formed=formed)


def test_the_cases_cancel():
    """By the norms of one slot alone, beside that of both."""
    for name, (slots, _) in KINDS.items():
        gradient = gradient_of(name, 1e-4)
        of_rows = roundings(gradient) / torch.finfo(torch.float32).eps
        assert float((of_rows / sample_norms(gradient)).min()) > 1e3, (name, slots)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", [name for name, (slots, _) in KINDS.items() if len(slots) > 1])
def test_norms_of_slots_of_one_weight(name, gap):
    """To 1e-6, of what was 1e-6 of its parts as well, of whose squares float32 has 7 digits."""
    gradient = gradient_of(name, gap)
    expected = sample_norms(in_float64(gradient))
    assert bool((expected > 0).all())
    torch.testing.assert_close(sample_norms(gradient).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", KINDS)
def test_norms_are_never_too_small(name, gap):
    gradient = gradient_of(name, gap)
    expected = sample_norms(in_float64(gradient))
    found = sample_norms(gradient) + roundings(gradient)
    assert bool((found.double() >= expected * (1 - 1e-7)).all())


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_formed_is_no_longer_than_the_limit(name, gap, dtype):
    """With its rounding errors, which are those of the rows and not of what is left of them."""
    check_formed(gradient_of(name, gap, dtype))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("name", ["rows of one slot", "many rows of one slot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_formed_early_is_no_longer_than_the_limit(name, gap, dtype):
    """Products of samples, with their rounding errors, are what is clipped then."""
    gradient = gradient_of(name, gap, dtype)
    ((slot, part),) = gradient.rows.items()
    rows = as_vectors(slot, *products(slot, part, B))
    check_formed(replace(gradient, rows=rows))


def check_formed(gradient: og.SiteGradient) -> None:
    norms_B = sample_norms(gradient)
    limit = 0.5 * float(norms_B.median())
    factor_B = clipped(norms_B + roundings(gradient), limit)
    assert float(factor_B.min()) < 1
    for b in range(B):
        only_B = torch.zeros(B).index_fill(0, torch.tensor([b]), float(factor_B[b]))
        assert float(norm(in_float64(weighted_sum(gradient, only_B)))) <= limit * (1 + 1e-6)


def test_norms_of_ordinary_gradients_hardly_change():
    """Of 60 rows in any directions."""
    torch.manual_seed(0)
    rows = og.Factors(torch.randn(1, 60 * B, 30), torch.randn(1, 60 * B, 50))
    part = og.SampleRows(rows, torch.arange(B).repeat_interleave(60))
    gradient = og.SiteGradient({FIRST: part}, {}, {"w": torch.zeros(30, 50)}, B)
    assert float((roundings(gradient) / sample_norms(gradient)).max()) < 2e-6


def test_no_rows_have_no_error():
    rows = og.Factors(torch.zeros(1, 0, 30), torch.zeros(1, 0, 50))
    part = og.SampleRows(rows, torch.zeros(0, dtype=torch.int64))
    for samples in (0, 3):
        gradient = og.SiteGradient({FIRST: part}, {}, {"w": torch.zeros(30, 50)}, samples)
        assert roundings(gradient).tolist() == [0.0] * samples
