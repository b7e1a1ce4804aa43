"""A method has one name and one look."""

from __future__ import annotations

import pytest

from outergrad.tools.named_methods.attach import CONFIGURABLE, METHODS
from outergrad_lab.experiments.quantities import NOTHING, QUANTITIES, heading, text
from outergrad_lab.labels import LOOKS, NAMES, Method, told_apart
from outergrad_lab.peers.named import PEERS

LABELS = {
    "pooled": "pooled",
    "alone": "no sharing",
    "ddp": "PyTorch DDP",
    "ddp-again": "PyTorch DDP, again",
    "ddp-fp16": "PyTorch DDP, fp16",
    "dad": "dAD",
    "rank-dad:rank=8": "rank-dAD, rank 8",
    "rank-dad-8": "rank-dAD, rank 8",
    "rank-dad:rank=8:wire=int8": "rank-dAD, rank 8, wire = int8",
    "og-powersgd:rank=8": "PowerSGD, rank 8",
    "powersgd-4": "PyTorch PowerSGD, rank 4",
    "sparse:density=0.01:select=topk": "sparse, top-k, density = 0.01",
    "first-rows:rank=8": "first 8 rows",
    "local-steps:k=50": "LocalSteps, k = 50",
    "sparse:density=0.01": "sparse, density = 0.01",
    "demo:entries=8": "DeMo, entries = 8",
    "dion:rank=4": "Dion, rank 4",
    "sparse:density=0.01:select=threshold": "sparse, density = 0.01",
    "sparse:density=0.01:select=random": "sparse, random, density = 0.01",
    "sparse:select=random_blocks:block=16": "sparse, random blocks, block = 16",
    "sparse:select=topk:momentum=0.9": "sparse, top-k, momentum = 0.9",
    "new": "new",
}


@pytest.mark.parametrize(("name", "label"), LABELS.items())
def test_labels(name, label):
    assert Method.parse(name).label == label


@pytest.mark.parametrize(
    ("name", "family", "rank"),
    [("rank-dad:rank=8", "rank-dad", 8), ("powersgd-4", "powersgd", 4), ("dad", "dad", None)],
)
def test_families_and_ranks(name, family, rank):
    assert (Method.parse(name).family, Method.parse(name).rank) == (family, rank)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_recipes_has_a_name_of_its_own(method):
    assert Method.parse(method).family in NAMES
    assert [Method.parse(other).label for other in METHODS].count(Method.parse(method).label) == 1


def test_no_two_methods_of_the_recipes_look_alike():
    looks = {str(Method.parse(name).look) for name in METHODS}
    assert len(looks) == len(METHODS)


@pytest.mark.parametrize("family", [*CONFIGURABLE, *PEERS])
def test_every_method_with_settings_has_a_name_and_a_colour(family):
    assert family in NAMES
    assert [look["color"] for look in LOOKS.values()].count(LOOKS[family]["color"]) <= 2


def test_higher_ranks_are_darker():
    shades = [int(Method.parse(f"rank-dad:rank={r}").look["color"][3:5], 16) for r in (1, 8, 64)]
    assert shades == sorted(shades, reverse=True)
    assert len(set(shades)) == 3


def test_methods_of_one_colour_have_other_dashes():
    methods = ["dad", "dad:bucket_bytes=1", "ddp", "dad:bucket_bytes=2"]
    looks = [Method.parse(method).look for method in methods]
    found = told_apart(looks)
    assert len({str((look["color"], look["linestyle"])) for look in found}) == 4
    assert (found[0], found[2]) == (looks[0], looks[2])


@pytest.mark.parametrize(
    ("name", "values", "written"),
    [
        ("accuracy", (0.9712, 0.968, 0.974), ("97.1 %", "96.8", "97.4")),
        ("auc", (0.9534,), ("0.953",)),
        ("sent_bytes", (1_240_000, 999_000), ("1.24 MB", "1.00")),
        ("sent_bytes", (2500,), ("2.50 kB",)),
        ("sent_bytes", (0,), ("0 B",)),
        ("step_s", (0.0123,), ("12.3 ms",)),
        ("step_s", (0.0000123,), ("12.3 µs",)),
        ("step_s", (2,), ("2.00 s",)),
        ("fewer", (13.24,), ("13.2\N{MULTIPLICATION SIGN}",)),
        ("gap", (1.2e-7,), ("1.2e-07",)),
        ("gap", (0,), ("0",)),
        ("gap", (float("inf"),), ("∞",)),
        ("error", (0.4212,), ("0.421",)),
    ],
)
def test_numbers_for_humans(name, values, written):
    assert QUANTITIES[name].write(*values) == written


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sites", 2, "2 sites"),
        ("sites", 1, "1 site"),
        ("rank", 8.0, "rank 8"),
        ("activation", "relu", "relu"),
        ("method", "alone", "no sharing"),
        ("family", "rank-dad", "rank-dAD"),
        ("link", "100mbit", "100 Mbit/s"),
        ("link", "none", "unshaped"),
        ("batch_size", 32, "batch size 32"),
    ],
)
def test_settings_for_humans(name, value, said):
    assert heading(name, value) == said


def test_what_is_missing_is_a_dash():
    assert text("rank", None) == text("rank", float("nan")) == NOTHING
