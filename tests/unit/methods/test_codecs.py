"""Methods whose rows are encoded: what all sites apply, what is owed, and how many bytes travel."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from coded import CODECS, WEIGHTS, by_codecs_methods_and_sites, by_dropping, by_sites, few
from low_rank import (
    backward,
    error,
    expected,
    mean_gradients,
    train,
)
from outergrad.core.types import Link, Route, Unit
from outergrad.wire import BF16, Int8, Plain, TopK
from ranks import run_on_lasting_groups


@by_codecs_methods_and_sites
def test_all_sites_apply_the_same_and_vectors_lose_nothing(codecs, method, sites, large_matrices):
    for rows in (few, lambda rank, step: 40):
        results = train(method(wire=codecs), sites, 3, rows)
        for step in range(3):
            mean = expected(sites, step, rows)
            for name, gradient in results[0][0][step].items():
                assert all(gradient.equal(found[step][name]) for found, _ in results), name
                if name not in WEIGHTS:
                    assert error(gradient, mean[name]) < 5e-6, name


def rounding(codecs: tuple[Any, ...], width: int) -> float:
    """Largest error of a row of so many entries, relative to its norm."""
    return {BF16: 2.0**-8, Int8: width**0.5 / 254}[type(codecs[0])]


@pytest.mark.parametrize("codecs", [(BF16(),), (Int8(),)], ids=["bf16", "int8"])
@pytest.mark.parametrize("always", [True, False])
@by_sites
def test_dad_is_as_close_as_its_rows(codecs, always, sites):
    """Canonical factors are orthonormal rows P and Z, as large as the gradient: errors add up."""
    inputs, outputs, rows = 60, 50, 8
    original = nn.Linear(inputs, outputs)
    xs = [torch.randn(rows, inputs) for _ in range(sites)]

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, og.DAD(wire=codecs, always=always), group=group)
        return backward(replica, xs[rank])

    mean = mean_gradients(original, xs)
    of_p, of_z = rounding(codecs, outputs), rounding(codecs, inputs)
    norms = [mean_gradients(original, [x])["weight"].norm() for x in xs]
    bound = (of_z + (1 + of_z) * of_p * rows**0.5) * sum(norms) / sites
    for found in run_on_lasting_groups(sites, body):
        off = (found["weight"] - mean["weight"]).norm()
        assert 0 < off < bound
        assert error(found["bias"], mean["bias"]) < 5e-6


@by_sites
def test_topk_loses_nothing_of_rows_with_few_entries(sites):
    original = nn.Linear(60, 50)
    xs = [torch.randn(8, 60) * (torch.arange(60) % 10 == rank) for rank in range(sites)]

    def loss(replica: nn.Module, x: Tensor) -> dict[str, Tensor]:
        replica(x)[:, 3::10].square().mean().backward()
        return {name: p.grad for name, p in replica.named_parameters()}

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, og.DAD(wire=TopK(0.1)), group=group)
        return loss(replica, xs[rank])

    sent_apart = [loss(copy.deepcopy(original), x) for x in xs]
    for found in run_on_lasting_groups(sites, body):
        for name, gradient in found.items():
            assert error(gradient, sum(g[name] for g in sent_apart).double() / sites) < 1e-6, name


# -- bytes ----------------------------------------------------------------------------------------

ROW_BYTES = {
    "bf16": lambda width: 2 * width,
    "int8": lambda width: width + 4,
    "int4": lambda width: -(-width // 8) * 4 + -(-width // 64) * 2,
    "topk": lambda width: round(0.3 * width) * (4 + 2),
    "topk, int8": lambda width: round(0.3 * width) * (1 + 2) + 4,
}


@by_sites
@pytest.mark.parametrize("label", CODECS)
def test_bytes_on_the_wire_are_those_promised(label, sites):
    """Rows of deltas and activations, and a bias gradient in float32, to each other site."""
    inputs, outputs, rows = 300, 200, 10

    def body(rank, group):
        replica = nn.Linear(inputs, outputs)
        session = og.distribute(replica, og.DAD(wire=CODECS[label]), group=group)
        backward(replica, torch.randn(rows, inputs))
        return session.stats().layers

    per_row = ROW_BYTES[label](inputs) + ROW_BYTES[label](outputs)
    promised, padding = rows * per_row + 4 * outputs, 5 * 16
    for layers in run_on_lasting_groups(sites, body):
        (layer,) = layers.values()
        assert promised <= layer.sent_bytes / (sites - 1) < promised + padding


@pytest.mark.parametrize(("label", "times"), [("bf16", 2.0), ("int8", 3.7), ("topk, int8", 4.0)])
def test_a_layer_travels_as_factors_where_encoding_makes_that_pay(label, times):
    slot = og.Slot("l", "l.weight", 500, 400)
    unit = Unit((slot,), ("l.weight",), 500 * 400, (slot,))
    plain, encoded = (og.DAD(wire=wire).compressor() for wire in ((), CODECS[label]))
    limit = plain.break_even(unit, 2)
    assert encoded.break_even(unit, 2) >= times * limit
    rows = round(1.5 * limit)
    assert plain.route(unit, [[rows]] * 2, tapped=True) == Route.DENSE
    assert encoded.route(unit, [[rows]] * 2, tapped=True) == Route.GATHER
    ranks = {wire: og.RankDAD(rank=rows, wire=wire).compressor() for wire in ((), CODECS[label])}
    ways = [low_rank.route(unit, [[5000]] * 2, tapped=False) for low_rank in ranks.values()]
    assert ways == [Route.DENSE, Route.GATHER]


@pytest.mark.parametrize("link", [Link(1e-2, 1e10), Link(1e-5, 1e5)], ids=["fast", "slow"])
@pytest.mark.parametrize("sites", [3, 16])
@pytest.mark.parametrize("layers", [1, 40])
@by_dropping
def test_auto_never_adds_up_what_cannot_be(codecs, layers, sites, link):
    slots = [og.Slot(f"{i}", f"{i}.weight", 1000, 1000) for i in range(layers)]
    units = [Unit((slot,), (slot.weight,), 10**6, (slot,)) for slot in slots]
    compressor, rows_SK = og.RankDAD(wire=codecs).compressor(), [[10_000]] * sites
    ways = (Route.GATHER, Route.TWO_WAY)
    assert compressor.route(units[0], rows_SK, tapped=False) in ways
    compressor.settle_reduce(units, sites, link)
    assert compressor.route(units[0], rows_SK, tapped=False) in ways
    auto = compressor.auto_way
    assert Route.REDUCE not in (auto.way, *(way for way, _ in auto.others))


# -- embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "is_exact"),
    [
        (og.RankDAD(wire=(TopK(0.3), Int8())), True),
        (og.RankDAD(wire=(TopK(0.3), Int8()), error_feedback=None), False),
        (og.DAD(wire=(TopK(0.3), Int8())), False),
    ],
    ids=["remembering", "forgetting", "dad"],
)
def test_rows_by_id_of_a_method_with_a_memory_are_not_dropped(method, is_exact):
    """They have none, and the same entries would be missing again and again."""
    original = nn.Embedding(500, 40)
    ids = [torch.randint(500, (4,)) for _ in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(original)
        og.distribute(replica, method, group=group)
        return backward(replica, ids[rank])["weight"]

    plain = [backward(copy.deepcopy(original), x)["weight"].double() for x in ids]
    off = [error(found, sum(plain) / 2) for found in run_on_lasting_groups(2, body)]
    assert all(e < 1e-6 if is_exact else 0.1 < e < 1 for e in off)


# -- a user's own ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half:
    """Rounds to float16."""

    rounds_to: ClassVar[torch.dtype | None] = torch.float16
    picks: ClassVar[bool] = False

    def tensors(self, shape, dtype):
        return [Plain(shape, torch.float16)]

    def encode(self, rows):
        return [rows.half()]

    def decode(self, written, shape):
        return written[0].float()


@pytest.mark.parametrize("wire", [(Half(),), (TopK(1.0), Half())], ids=["alone", "behind TopK"])
def test_any_method_takes_a_codec_of_your_own(wire):
    methods: list[Any] = [og.DAD(wire=wire), og.RankDAD(rank=8, wire=wire, error_feedback=None)]
    if len(wire) == 1:
        methods.append(og.PowerSGD(rank=40, wire=wire, min_ratio=1, error_feedback=False))
    means = expected(2, 1, few)
    for method in methods:
        for gradients, _ in train(method, 2, 2, few):
            off = [error(gradients[1][name], means[name]) for name in WEIGHTS]
            assert all(1e-5 < e < 1e-3 for e in off), method
