"""The norms of single samples that are recorded, and which stand out, are those of autograd."""

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from by_sample import SampleCase, built, by_sample, loss_of
from cases import Branches, Events
from covering import rest_slow
from outergrad.record.gauge import median_and_outliers
from ranks import run_on_lasting_groups

SITES = 2
METHODS = {
    "dad": og.DAD(always=True),
    "rank-dad": og.RankDAD(rank=2),
    "two way": og.RankDAD(rank=2, reduce="two_way"),
    "all_reduce": og.RankDAD(rank=2, reduce="all_reduce"),
    "dense": og.Dense(),
    "edad": og.EDAD(always=True),
    "sparse": og.Sparse(density=0.1, always=True),
}
CASES = built()
WIDE = [torch.randn(n, 300, generator=torch.Generator().manual_seed(n)) for n in (5, 3)]
SEVERAL = ("tied", "used twice", "cell")
SHARED = "positions of all"  # whose layer counts positions: a recorder knows no others
ONE_PRODUCT = [n for n in CASES if n not in (*SEVERAL, SHARED, "lstm with projection")]
QUICK = ["wide", "positions", "conv", "embedding", "attention"]


class Told(Events):
    """Hears of single samples."""

    samples = True


def recorded(case: SampleCase, method, recorder=Told, steps=1):
    def body(rank, group):
        model, events = copy.deepcopy(case.model), recorder()
        session = og.distribute(model, method, group=group, recorder=events)
        for _ in range(steps):
            model.zero_grad()
            loss_of(model, case.batches[rank]).backward()
        session.detach()
        return events

    return run_on_lasting_groups(SITES, body)


def norms(case, site, name):
    """Of each sample's part of the gradient of a parameter, in float64."""
    found = [gradients[name] for gradients in by_sample(case, site)]
    return torch.stack([g.norm() for g in found])


@pytest.mark.parametrize("name", rest_slow(ONE_PRODUCT, QUICK))
def test_norms_are_those_of_each_sample_alone(name):
    case = CASES[name]
    for site, events in enumerate(recorded(case, METHODS["dad"])):
        told = [event for event in events.layers if event.sample_norm is not None]
        assert told or name in ("frozen", "used by one", "bias alone")
        for event in told:
            expected_B = norms(case, site, event.layer)
            scale = float(expected_B.max()) + 1e-12
            assert event.samples == len(expected_B)
            assert event.sample_norm == pytest.approx(
                float(expected_B.median()), rel=1e-4, abs=1e-4 * scale
            )
            for place, norm in zip(event.outliers, event.outlier_norms, strict=True):
                assert norm == pytest.approx(float(expected_B[place]), rel=1e-4)


BY_ROWS = ("dad", "rank-dad", "two way", "all_reduce", "edad")  # which sends the first layer's
NOT_CAPTURED = "its rows were not captured"


@pytest.mark.parametrize("label", METHODS)
def test_where_there_are_no_rows_it_is_said_why(label):
    case = SampleCase(nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 4)), WIDE)
    for site, events in enumerate(recorded(case, METHODS[label], steps=2)):
        *_, event = (e for e in events.layers if e.layer == "0.weight")
        if label in BY_ROWS:
            median = float(norms(case, site, "0.weight").median())
            assert event.sample_norm == pytest.approx(median, rel=1e-4)
            assert "sample_norm" not in (event.unmeasured or {})
        else:
            assert event.sample_norm is None
            assert event.unmeasured["sample_norm"] == NOT_CAPTURED


@pytest.mark.parametrize(
    ("name", "layer", "why"),
    [
        ("used twice", "layer.weight", "its layer was used several times"),
        ("tied", "embed.weight", NOT_CAPTURED),  # added up by autograd
    ],
)
def test_what_cannot_be_told_apart_is_not_made_up(name, layer, why):
    for events in recorded(CASES[name], METHODS["dad"]):
        (event,) = (e for e in events.layers if e.layer == layer)
        assert event.sample_norm is None
        assert event.unmeasured["sample_norm"] == why


def test_the_sample_that_stands_out_is_named():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    x[5] *= 20
    model = Branches(lambda m, x: m.layer(x), layer=nn.Linear(6, 7))
    case = SampleCase(model, [x, torch.randn(8, 6)])
    odd, usual = recorded(case, METHODS["dad"])
    (event,) = (e for e in odd.layers if e.layer == "layer.weight")
    assert event.outliers[0] == 5
    assert event.outlier_norms[0] > 3 * event.sample_norm
    (event,) = (e for e in usual.layers if e.layer == "layer.weight")
    assert event.outliers == ()


def test_only_who_asks_hears_of_samples():
    for events in recorded(CASES["wide"], METHODS["dad"], recorder=Events):
        for event in events.layers:
            assert (event.samples, event.sample_norm, event.outliers) == (0, None, ())
            assert "sample_norm" not in (event.unmeasured or {})


def test_gradients_are_the_same_bits_whoever_listens():
    case = CASES["conv"]

    def body(rank, group, recorder):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, METHODS["dad"], group=group, recorder=recorder)
        loss_of(model, case.batches[rank]).backward()
        session.detach()
        return [p.grad for p in model.parameters()]

    plain = run_on_lasting_groups(SITES, lambda r, g: body(r, g, None))
    told = run_on_lasting_groups(SITES, lambda r, g: body(r, g, Told()))
    for ours, theirs in zip(plain, told, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_samples_stand_out_above_three_medians_and_where_they_are_not_finite():
    norms_B = torch.tensor([1.0, 1.1, 3.5, 0.9, float("nan"), 1.0, 2.9])
    median, places = median_and_outliers(norms_B)
    assert median == pytest.approx(1.1)
    assert places == [4, 2]
