"""benchmarks/poseidon.py: its formulas against the paper's, and its bytes against a training's."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import outergrad as og
from places import REPOSITORY
from ranks import run_on_lasting_groups

sys.path.append(str(REPOSITORY / "benchmarks"))
import poseidon
from poseidon import RANK, SITES, WAYS, Layer, chosen, factors, lines, summed, vgg19

from outergrad.core.types import Route

SQUARE = Layer("fc", 4096, 4096)


def test_vgg19_has_the_parameters_of_the_paper():
    layers = list(vgg19())
    assert len(layers) == 16 + 3
    assert sum(layer.numel for layer in layers) == 143_667_240


def test_figures_by_hand_of_a_square_layer_at_eight_sites():
    weights = 4096 * 4096 + 4096
    assert summed(SQUARE, 8, 32) == 4 * 2 * 7 / 8 * weights == 117_469_184
    assert factors(SQUARE, 8, 32) == 4 * 7 * 32 * 8192 == 7_340_032
    assert poseidon.poseidon(SQUARE, 8, 32) == factors(SQUARE, 8, 32)


@pytest.mark.parametrize(
    ("outputs", "inputs", "limit"), [(4096, 4096, 4096), (4096, 25088, 7042), (21841, 4096, 6898)]
)
def test_factors_pay_up_to_so_many_rows_of_all_sites(outputs, inputs, limit):
    """P B up to 2 M N / (M + N), for an M x N layer; a bias adds less than a row in thousand."""
    layer = Layer("fc", outputs, inputs)
    assert limit == int(2 * outputs * inputs / (outputs + inputs))
    for sites in (2, 8, 32):
        below, above = limit // sites, int(1.001 * limit / sites) + 1
        assert factors(layer, sites, below) < summed(layer, sites, below)
        assert factors(layer, sites, above) > summed(layer, sites, above)
        assert poseidon.poseidon(layer, sites, above) == summed(layer, sites, above)


@pytest.mark.parametrize("sites", SITES)
def test_dad_chooses_what_poseidon_does_and_sends_biases_besides(sites):
    for layer in vgg19():
        route, count = chosen(og.DAD(), layer, sites, 32)
        by_rule, own = WAYS["Poseidon"](layer, sites, 32), WAYS["dAD"](layer, sites, 32)
        assert (route == Route.GATHER) == (by_rule < summed(layer, sites, 32))
        if route == Route.GATHER:
            assert count == 32
            assert own == by_rule + 4 * (sites - 1) * layer.outputs
        else:
            assert own == by_rule


def test_a_convolution_counts_its_positions():
    layer = next(vgg19())
    assert factors(layer, 2, 32) == 4 * 32 * 224 * 224 * (64 + 27)
    assert WAYS["Poseidon"](layer, 2, 32) == WAYS["server"](layer, 2, 32)


@pytest.mark.parametrize(
    ("way", "method", "sites"),
    [("dAD", og.DAD(), 2), ("dAD", og.DAD(), 3), ("rank-dAD", og.RankDAD(rank=RANK), 2)],
)
def test_a_training_sends_these_bytes(way, method, sites):
    """For a layer whose factors pay, and one whose do not and that is long enough for a ring."""
    widths, rows = (600, 500, 70), 100

    def site(rank, group):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:]))
        session = og.distribute(model, method, group=group)
        for _ in range(3):
            model(torch.randn(rows, widths[0])).square().mean().backward()
        sent = {name: layer.sent_bytes for name, layer in session.stats().layers.items()}
        session.detach()
        return sent

    sent = run_on_lasting_groups(sites, site)[0]
    for name, inputs, outputs in (("0", *widths[:2]), ("2", *widths[1:])):
        layer = Layer(name, outputs, inputs)
        booked = sum(nbytes for label, nbytes in sent.items() if label.split(".")[0] == name)
        assert booked == pytest.approx(WAYS[way](layer, sites, rows), abs=1)


def test_the_table_has_a_line_for_each_layer_and_one_for_all():
    table = list(lines(8, 32, each=True))
    assert [line[1] for line in table] == [*(layer.name for layer in vgg19()), "all"]
    short = list(lines(8, 32))
    assert [line[1] for line in short] == ["16 convolutions", "fc6", "fc7", "fc8", "all"]
    assert short[-1] == table[-1]
    assert short[-1][2] == f"{4 * 2 * 7 / 8 * 143_667_240 / 1e6:,.1f}"
