"""Sparse: settings, how many entries and bytes are sent of which weights, and in which steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from covering import covering
from low_rank import backward, error, expected, gradients_around_a_void_step, mean_gradients
from outergrad.core.types import Route, Unit
from ranks import run_on_lasting_groups
from sparse_trainings import SELECTS, SUMMED, WEIGHTS, linear, lost, means_of, owed, train

MISTAKES = {
    "density": ({"density": 0.0}, r"a number in \(0, 1\]"),
    "more than all": ({"density": 1.01}, r"a number in \(0, 1\]"),
    "no density": ({"density": float("nan")}, r"a number in \(0, 1\]"),
    "select": ({"select": "largest"}, "one of .*threshold"),
    "block": ({"block": 0}, "1 or more"),
    "momentum": ({"momentum": 1.0}, r"a number in \[0, 1\)"),
    "forgotten": ({"momentum": 0.9, "error_feedback": False}, "0 without error_feedback"),
    "warmup": ({"warmup": -1}, "a number of steps"),
    "wire": ({"wire": "bf16"}, "codecs of og.wire"),
    "picks twice": ({"wire": og.wire.TopK(0.1)}, "codecs that keep all values"),
    "sums beside vectors": ({"vectors": og.wire.Int4(), "select": "random"}, "a wire that drops"),
    "bucket_bytes": ({"bucket_bytes": 0}, "a positive number"),
    "every": ({"every": 0}, "1 or more"),
}


@pytest.mark.parametrize(("settings", "remedy"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_setting_is_named_in_one_line(settings, remedy):
    with pytest.raises(ValueError, match=rf"Sparse: .*{remedy}") as caught:
        og.Sparse(**settings)
    assert "\n" not in str(caught.value)
    assert f"{next(iter(settings))}=" in str(caught.value)


def test_settings_are_shown_where_they_are_not_the_usual_ones():
    assert repr(og.Sparse()) == "Sparse()"
    shown = repr(og.Sparse(density=0.1, select="blocks", wire=og.wire.Int8()))
    assert shown == "Sparse(density=0.1, select='blocks', wire=(Int8(),))"


def slot(inputs: int, outputs: int, groups: int = 1) -> og.Slot:
    return og.Slot("l", "l.weight", outputs, inputs, groups=groups)


COUNTS = {
    "a share": ({"density": 0.05}, slot(100, 80), 400),
    "of all groups": ({"density": 0.05}, slot(10, 20, groups=4), 40),
    "one at least": ({"density": 0.001}, slot(7, 5), 1),
    "all": ({"density": 1.0}, slot(7, 5), 35),
    "whole blocks": ({"density": 0.05, "select": "blocks"}, slot(100, 80), 6 * 64),
    "a block at least": ({"density": 0.001, "select": "blocks"}, slot(100, 80), 64),
    "less than a block": ({"density": 0.1, "select": "blocks"}, slot(7, 5), 35),
    "random blocks": ({"density": 0.05, "select": "random_blocks"}, slot(100, 80), 6 * 64),
    "all blocks": ({"density": 1.0, "select": "blocks"}, slot(10, 13), 130),
}


@pytest.mark.parametrize(("settings", "matrix", "count"), COUNTS.values(), ids=COUNTS)
def test_so_many_entries_are_sent(settings, matrix, count):
    compressor = og.Sparse(**settings).compressor()
    assert compressor.sent_rows(matrix, 10, 0) == count
    assert compressor.sent_rows(matrix, 0, 0) == 0


# Of 8000 entries 400 are sent. Their places: 4 low bits of each, in 4 planes of 400 bits, and
# ceil(8000 / 16) - 1 zeros among 400 ones, 899 bits. Of 125 blocks 6: 3 planes of 6 bits, 15
# zeros among 6 ones.
PLACES, BLOCKS = 4 * 50 + 113, 3 * 1 + 3
BYTES = {
    "topk": (og.Sparse(density=0.05, select="topk"), 4 * 400, PLACES),
    "threshold": (og.Sparse(density=0.05), 4 * 400, PLACES),
    "blocks": (og.Sparse(density=0.05, select="blocks"), 4 * 384, BLOCKS),
    "random": (og.Sparse(density=0.05, select="random"), 4 * 400, 0),
    "random blocks": (og.Sparse(density=0.05, select="random_blocks"), 4 * 384, 0),
    "bf16": (og.Sparse(density=0.05, wire=og.wire.BF16()), 2 * 400, PLACES),
    "bf16 random": (og.Sparse(density=0.05, select="random", wire=og.wire.BF16()), 2 * 400, 0),
    "int8": (og.Sparse(density=0.05, wire=og.wire.Int8()), 400 + 2 * 4, PLACES),
    "signs": (og.Sparse(density=0.064, wire=og.wire.Sign()), 512 // 8 + 2 * 2, 3 * 64 + 189),
    "signs random": (
        og.Sparse(density=0.064, select="random", wire=og.wire.Sign()),
        512 // 8 + 2 * 2,
        0,
    ),
    "all": (og.Sparse(density=1.0, always=True), 4 * 8000, 0),
}


@pytest.mark.parametrize(("method", "values", "places"), BYTES.values(), ids=BYTES)
def test_so_many_bytes_travel(method, values, places):
    """Fields of a message begin at multiples of 16 bytes."""
    stats = train(method, 2, 2)[0][2].layers["0.weight"]
    assert stats.sent_bytes == stats.received_bytes == up(values) + up(places)
    assert stats.travels == "sparse"
    assert method.compressor().payload_bytes(slot(100, 80), stats.kept_rows) == values + places


def up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize("sites", [2, 3, 6])
def test_entries_are_sent_where_they_are_fewer_bytes(select, sites):
    matrix = slot(100, 80)
    unit = Unit((matrix,), ("l.weight",), 8000, (matrix,))
    for percent in range(1, 101):
        compressor = og.Sparse(density=percent / 100, select=select).compressor()
        nbytes = compressor.payload_bytes(matrix, compressor.count(matrix))
        sent = 2 / sites * nbytes if select in SUMMED else nbytes
        way = Route.REDUCE if select in SUMMED else Route.GATHER
        route = compressor.route(unit, [[5]] * sites, tapped=False)
        assert route == (way if sent < 2 / sites * 4 * 8000 else Route.DENSE), percent
    forced = og.Sparse(density=1.0, select=select, always=True).compressor()
    assert forced.route(unit, [[5]] * sites, tapped=False) == way
    assert forced.route(unit, [[5]], tapped=False) == Route.DENSE


def test_the_density_falls_in_four_stages():
    """From a quarter, each time by the same factor."""
    method = og.Sparse(density=0.25 / 16, warmup=8)
    expected = [0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125, 0.25 / 16, 0.25 / 16]
    assert [method.density_at(step) for step in range(10)] == pytest.approx(expected)
    assert og.Sparse(density=0.3, warmup=8).density_at(0) == 0.3
    assert og.Sparse(density=0.1).density_at(0) == 0.1
    assert [og.Sparse(density=0.01, warmup=1).density_at(s) for s in (0, 1)] == [0.25, 0.01]


@pytest.mark.parametrize("select", SELECTS)
def test_the_number_of_entries_follows_the_warmup(select):
    """Steps go without headers all the while: every site knows where it is."""
    method = og.Sparse(density=0.25 / 16, warmup=8, select=select, block=8)
    original = nn.Linear(80, 50)

    def body(rank, group):
        replica, found = copy.deepcopy(original), []
        session = og.distribute(replica, method, group=group)
        for _ in range(10):
            backward(replica, torch.randn(5, 80))
            found.append(session.stats().layers["weight"].kept_rows)
            applied = replica.weight.grad.count_nonzero()
            assert found[-1] <= applied <= (1 if select in SUMMED else 2) * found[-1]
        session.detach()
        return found

    stages = [1000, 500, 250, 125, 62]
    if select.endswith("blocks"):
        stages = [1000, 504, 248, 128, 64]
    assert run_on_lasting_groups(2, body) == [[n for n in stages for _ in range(2)]] * 2


def test_the_plan_follows_the_warmup():
    """Eight sites would send more entries than dense at first."""
    method = og.Sparse(density=0.01, warmup=4)

    def body(rank, group):
        replica = linear(80, 50)
        session, found = og.distribute(replica, method, group=group), []
        for step in range(6):
            x = torch.randn(5, 80, generator=torch.Generator().manual_seed(8 * step + rank))
            gradient = backward(replica, x)["weight"]
            layer = session.stats().layers["weight"]
            found.append((layer.travels, session.coverage()[0].travels, layer.kept_rows, gradient))
        session.detach()
        return found

    results = run_on_lasting_groups(8, body)
    ways = [(travels, covered) for travels, covered, _, _ in results[0]]
    assert ways == [("dense", "dense")] + [("sparse", "sparse")] * 5
    assert [kept for *_, kept, _ in results[0]][1:] == [447, 200, 89, 40, 40]
    for site in results[1:]:
        assert all(a[3].equal(b[3]) for a, b in zip(site, results[0], strict=True))


def test_steps_of_other_parts_are_no_steps_of_a_warmup():
    """Only those in which the weight was shared."""
    method = og.PerLayer({"0.*": og.Sparse(density=0.01, warmup=4, every=3), "*": og.Dense()})

    def body(rank, group):
        replica = nn.Sequential(linear(80, 50), nn.Tanh(), linear(50, 5))
        session, found = og.distribute(replica, method, group=group), []
        for step in range(18):
            backward(replica, torch.randn(5, 80))
            layer = session.stats().layers.get("0.weight")
            found += [layer.kept_rows] if (step + 1) % 3 == 0 else []
        session.detach()
        return found

    assert run_on_lasting_groups(2, body) == [[1000, 447, 200, 89, 40, 40]] * 2


@pytest.mark.parametrize("select", SUMMED)
def test_random_places_are_the_same_on_all_sites_and_others_in_every_step(select):
    """Also of weights of the same shape, and by another seed; whole blocks."""
    one, other = run_on_lasting_groups(2, lambda *site: drawn_places(*site, select))
    assert one == other
    assert {len(places) for places in one} == {80}
    assert len({tuple(places) for places in one}) == len(one) == 16
    shared = max(len({*a} & {*b}) for k, a in enumerate(one) for b in one[:k])
    assert shared < (20 if select == "random" else 40)
    if select == "random_blocks":
        for places in one:
            assert not any(start % 8 for start in places[::8])
            assert places == [start + i for start in places[::8] for i in range(8)]


@pytest.mark.parametrize("select", SUMMED)
def test_and_the_same_where_values_are_gathered(select):
    """Where codecs drop small numbers; a few of these come back as zeros."""
    summed = run_on_lasting_groups(2, lambda *site: drawn_places(*site, select))[0]
    one, other = run_on_lasting_groups(2, lambda *site: drawn_places(*site, select, og.wire.Int8()))
    assert one == other
    assert all({*few} <= {*places} for few, places in zip(one, summed, strict=True))
    assert min(map(len, one)) > 70


def drawn_places(rank, group, select, wire=()):
    """Of two layers of one shape, by two seeds, in four steps."""
    found = []
    for seed in (0, 1):
        replica = nn.Sequential(linear(40, 40, 1), nn.Tanh(), linear(40, 40, 2))
        method = og.Sparse(density=0.05, select=select, block=8, seed=seed, wire=wire)
        session = og.distribute(replica, method, group=group)
        for step in range(4):
            x = torch.randn(5, 40, generator=torch.Generator().manual_seed(9 * step + rank))
            gradients = backward(replica, x)
            found += [g.flatten().nonzero().flatten().tolist() for g in gradients.values()]
        session.detach()
    return found


@pytest.mark.parametrize("select", SELECTS)
def test_what_is_sent_is_the_mean_of_what_each_site_chose(select):
    """Without a memory, from one gradient: the largest, or the largest blocks, of every site."""
    original = linear(48, 30)
    xs = [torch.randn(5, 48, generator=torch.Generator().manual_seed(site)) for site in range(3)]
    method = og.Sparse(density=0.1, select=select, block=12, error_feedback=False)

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, xs[rank])["weight"] for _ in range(2)]
        assert owed(session) == {}
        session.detach()
        return found

    expected = torch.zeros(30 * 48).double()
    for x in xs:
        gradient = mean_gradients(original, [x])["weight"].flatten()
        chosen = gradient.abs().topk(144).indices
        if select == "blocks":
            blocks = gradient.view(-1, 12).norm(dim=1).topk(12).indices
            chosen = (blocks[:, None] * 12 + torch.arange(12)).flatten()
        expected[chosen] += gradient[chosen] / 3
    first, second = run_on_lasting_groups(3, body)[0]
    if select in SUMMED:
        mean, sent = mean_gradients(original, xs)["weight"], first != 0
        assert sent.sum() == 144
        assert error(first[sent], mean[sent]) < 5e-6
        assert not second.equal(first)
    else:
        assert error(first.flatten(), expected) < 5e-6
        assert error(second.flatten(), expected) < 5e-6


def test_vectors_in_few_bits_are_owed_too():
    """All of their entries are sent in every step; what codecs lose comes later."""
    method = og.Sparse(
        density=0.3, select="random", wire=og.wire.Sign(), vectors=og.wire.Sign(), always=True
    )
    results = train(method, 2, 4)
    assert lost(results, 2, means_of(2, 4)) < 3e-7
    applied, unsent, stats = results[0]
    vectors = {name for name in applied[0] if name not in WEIGHTS}
    assert vectors <= unsent.keys()
    sizes = {n: -(-stats.layers[n].kept_rows // 8) for n in vectors}
    assert all(applied[0][n].numel() == stats.layers[n].kept_rows for n in vectors)
    assert all(stats.layers[n].sent_bytes == up(sizes[n]) + up(2) for n in vectors)


@pytest.mark.parametrize("select", SELECTS)
def test_what_the_coverage_table_says(select):
    """The largest entries tell of a site; sums tell of no site, if there are more than two."""
    blocks, same = "in blocks of 64", "the same on all sites"
    which = {"blocks": blocks, "random": same, "random_blocks": f"{blocks}, {same}"}
    which = which.get(select, "the largest")

    def body(rank, group):
        replica = nn.Sequential(linear(80, 50), nn.LayerNorm(50), nn.Linear(50, 2))
        session = og.distribute(replica, og.Sparse(density=0.025, select=select), group=group)
        backward(replica, torch.randn(5, 80))
        found = {travel.parameter: travel for travel in session.coverage()}
        session.detach()
        return found

    for sites in (2, 3):
        found = run_on_lasting_groups(sites, body)[0]
        sparse = found["0.weight"]
        assert (sparse.travels, sparse.why) == ("sparse", f"2.5% of the entries, {which}")
        assert found["1.weight"].travels == found["2.bias"].travels == "dense"
        if select in SUMMED:
            assert sparse.reveals == f"{found['1.weight'].reveals}, a few entries"
        else:
            assert sparse.reveals == "this site's gradient, its largest entries"


@pytest.mark.parametrize(("select", "sites"), covering(SELECTS, [2, 3], quick=4))
def test_a_discarded_step_is_as_if_it_had_not_been(select, sites):
    """Momentum, the memory, and which step of the warm-up it is."""
    method = og.Sparse(density=0.02, select=select, momentum=0.8, warmup=3)
    smooth, rough = (gradients_around_a_void_step(method, sites, void=v) for v in (False, True))
    for name in WEIGHTS:
        assert all(site[3][name].equal(smooth[0][3][name]) for site in rough)


@pytest.mark.parametrize("wire", [(), og.wire.BF16(), og.wire.Int8()], ids=str)
def test_vectors_lose_nothing(wire):
    found = train(og.Sparse(density=0.01, wire=wire), 2, 3)
    for name, gradient in found[0][0][2].items():
        if name not in WEIGHTS:
            assert error(gradient, expected(2, 2)[name]) < 5e-6, name
