"""What the coverage table says that an audit read, by kind of layer and how it travels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.record.readable import WORDS, Content, Layer, LayerKind, Word, layers_of
from ranks import run_on_lasting_groups


class Mixed(nn.Module):
    """A layer of each kind, wide enough that every method has something to leave out."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 5), nn.GroupNorm(1, 16)
        self.hidden = nn.Linear(256, 200)
        self.table = nn.Embedding(50, 9)
        self.memory = nn.GRU(9, 8, batch_first=True)
        self.out = nn.Linear(208, 5)

    def forward(self, x, ids):
        seen = self.hidden(self.norm(self.conv(x)).flatten(1)).relu()
        return self.out(torch.cat([seen, self.memory(self.table(ids))[0][:, -1]], 1))


METHODS = {
    Content.GRADIENT: [og.Dense(), og.DAD(always=True), og.LocalSteps(2, method=og.Dense())],
    Content.PARTS: [
        og.RankDAD(rank=2),
        og.RankDAD(rank=2, reduce="all_reduce"),
        og.PowerSGD(rank=1),
    ],
    Content.ENTRIES: [og.Sparse(always=True)],
}


def read(method, sites=2, **options) -> dict[str, str]:
    def body(rank, group):
        torch.manual_seed(0)
        net = Mixed()
        session = og.distribute(net, method, group=group, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            out = net(torch.ones(6, 1, 8, 8), torch.arange(24).view(6, 4))
            out.square().mean().backward()
            optimizer.step()
        found = {line.parameter: line.read for line in session.coverage()}
        session.detach()
        return found

    return run_on_lasting_groups(sites, body)[0]


@pytest.mark.parametrize("sites", [2, 3])
@pytest.mark.parametrize(
    ("way", "method"), [(way, method) for way, of in METHODS.items() for method in of], ids=repr
)
def test_the_word_is_that_of_the_layer_and_of_what_its_messages_say(way, method, sites):
    found = read(method, sites)
    assert found["hidden.weight"] == WORDS[LayerKind.LINEAR, way].value
    assert found["table.weight"] == WORDS[LayerKind.EMBEDDING, way].value
    assert found["conv.weight"] == WORDS[LayerKind.CONVOLUTION, way].value
    for layer in ("hidden", "conv", "out"):
        assert found[f"{layer}.bias"] == found[f"{layer}.weight"]


def test_layers_that_no_attack_is_for_say_so():
    found = read(og.Dense())
    for name in ("norm.weight", "norm.bias", "memory.weight_ih_l0", "memory.bias_hh_l0"):
        assert found[name] == Word.UNTRIED.value


def test_rows_that_travel_are_readable():
    found = read(og.DAD(reveal="activations", always=True))
    assert found["hidden.weight"] == found["hidden.bias"] == Word.ROWS.value


@pytest.mark.parametrize(("noise", "word"), [(1.0, Word.NOISE), (0.0, Word.UNTRIED)])
def test_of_what_a_transform_changes_the_audit_knows_noise_alone(noise, word):
    def body(rank, group):
        net = nn.Linear(20, 9)
        private = og.Private(clip=1.0, noise=noise, batch=12)
        session = og.distribute(net, og.Dense(), group=group, transform=private)
        net(torch.ones(6, 20)).square().mean().backward()
        found = {line.read for line in session.coverage()}
        session.detach()
        return found

    assert run_on_lasting_groups(2, body)[0] == {word.value}


def test_a_single_site_and_what_is_kept_send_nothing():
    assert set(read(og.Dense(), sites=1).values()) == {Word.NOTHING.value}
    kept = read(og.PerLayer({"hidden.*": og.Local(), "*": og.Dense()}))
    assert kept["hidden.weight"] == kept["hidden.bias"] == Word.NOTHING.value


def test_a_table_that_is_tied_to_a_head_is_none_of_ids():
    net = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    assert layers_of(net)["table.weight"] == Layer(LayerKind.EMBEDDING, "table.weight")
    net["head"].weight = net["table"].weight
    assert layers_of(net) == {"table.weight": Layer(LayerKind.LINEAR, "table.weight")}


def test_the_table_is_printed_with_its_words():
    def body(rank, group):
        session = og.distribute(nn.Linear(3, 2), og.Dense(), group=group)
        found = str(session.coverage())
        session.detach()
        return found

    head, _, *rows = run_on_lasting_groups(2, body)[0].splitlines()
    assert head.endswith("an audit read")
    assert all(row.endswith(Word.FEW_ROWS.value) for row in rows)
