"""The singular values by group that are recorded are those of gradients that autograd forms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outergrad as og
from by_sample import SampleCase, built, by_sample, floats, loss_of
from cases import Branches, Events
from covering import rest_slow
from outergrad.core.types import Factors, Slot
from outergrad.record.gauge import SPECTRUM
from outergrad.record.groups import GroupSpectra
from ranks import run_on_lasting_groups

SITES = 2
LABELS = [["a", "b", "a", "c", "b"], ["b", "b", "c"]]
CASES = built()
SKIPPED = ("tied", "positions of all", "lstm with projection")
QUICK = ["wide", "positions", "conv", "embedding", "used twice", "attention"]
EXACT = og.DAD(always=True)


class Told(Events):
    """Hears of groups."""

    groups = True


def recorded(case: SampleCase, method=EXACT, labels=LABELS, recorder=Told, passes=1, **settings):
    def body(rank, group):
        model, events = copy.deepcopy(case.model), recorder()
        session = og.distribute(model, method, group=group, recorder=events, **settings)
        for k in range(passes):
            if labels is not None:
                session.groups(labels[rank])
            loss = loss_of(model, case.batches[rank]) / passes
            if k < passes - 1:
                with session.no_sync():
                    loss.backward()
            else:
                loss.backward()
        session.detach()
        return events

    return run_on_lasting_groups(SITES, body)


def added_by(case: SampleCase, site: int, label: str, name: str) -> torch.Tensor:
    """What a group adds to the gradient of a parameter, in float64, by plain autograd."""
    of = zip(LABELS[site], by_sample(case, site), strict=True)
    return torch.stack([gradients[name] for here, gradients in of if here == label]).sum(0)


def largest(gradient: torch.Tensor, shapes) -> torch.Tensor:
    """The singular values of the matrices that a weight's rows are divided into, as recorded."""
    parts = gradient.flatten(1).split(shapes) if shapes else [gradient.flatten(1)]
    sigma = torch.cat([torch.linalg.svdvals(part) for part in parts])
    return sigma.sort(descending=True).values[:SPECTRUM]


def parts_of(case: SampleCase, name: str) -> list[int]:
    """The rows of each matrix: those of a group of a convolution."""
    layer = case.model.get_submodule(name.rpartition(".")[0]) if "." in name else case.model
    if isinstance(layer, nn.modules.conv._ConvNd):
        return [layer.out_channels // layer.groups] * layer.groups
    return []


@pytest.mark.parametrize("name", rest_slow([n for n in CASES if n not in SKIPPED], QUICK))
def test_values_are_those_of_the_gradient_of_each_group(name):
    case = CASES[name]
    for site, events in enumerate(recorded(case)):
        told = [event for event in events.layers if event.group_rows is not None]
        assert told or name in ("used by one", "bias alone", "frozen", "norms")
        for event in told:
            assert set(event.group_rows) <= set(LABELS[site])
            for label, found in event.group_gradient.items():
                wanted = added_by(case, site, label, event.layer)
                wanted = largest(wanted, parts_of(case, event.layer))
                found = torch.tensor(found, dtype=torch.float64)
                most = float(max(wanted.max(), 1e-9))
                count = min(len(found), len(wanted))
                assert torch.allclose(found[:count], wanted[:count], atol=2e-6 * most, rtol=1e-5)
                assert not (wanted[count:] > 2e-6 * most).any()


def test_what_groups_add_sums_to_the_gradient_of_the_site():
    """Of gradients of rank one in orthogonal directions the squares add up, too."""
    weight = torch.eye(4)
    model = Branches(lambda m, x: m.layer(x), layer=nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model.layer.weight.copy_(weight)
    case = SampleCase(model, [torch.eye(4)[:3], torch.eye(4)[:3]])

    def body(rank, group):
        own, events = copy.deepcopy(case.model), Told()
        session = og.distribute(own, EXACT, group=group, recorder=events)
        session.groups([0, 1, 1])
        own(case.batches[rank]).square().sum().backward()
        session.detach()
        return events

    for events in run_on_lasting_groups(SITES, body):
        (event,) = (e for e in events.layers if e.layer == "layer.weight")
        assert event.group_rows == {"0": 1, "1": 2}
        assert event.group_gradient["0"] == pytest.approx((2.0,))
        assert event.group_gradient["1"] == pytest.approx((2.0, 2.0))
        assert event.group_activations["1"] == pytest.approx((1.0, 1.0))
        assert event.group_deltas["1"] == pytest.approx((2.0, 2.0))
        whole = sum(v**2 for values in event.group_gradient.values() for v in values)
        assert whole == pytest.approx(event.gradient_norm**2)


def test_activations_and_deltas_are_those_of_the_rows():
    x = floats(6)
    case = SampleCase(Branches(lambda m, x: m.layer(x), layer=nn.Linear(6, 7)), x)
    for site, events in enumerate(recorded(case)):
        (event,) = (e for e in events.layers if e.layer == "layer.weight")
        y = case.model(x[site]).detach().requires_grad_()
        (y.square().mean() + y.sin().mean()).backward()
        for label in set(LABELS[site]):
            here = [k for k, other in enumerate(LABELS[site]) if other == label]
            for found, rows in ((event.group_activations, x[site]), (event.group_deltas, y.grad)):
                wanted = torch.linalg.svdvals(rows[here].double()).tolist()
                assert found[label] == pytest.approx(wanted, rel=1e-5)


def test_without_labels_a_site_is_one_group():
    case = CASES["wide"]
    for site, events in enumerate(recorded(case, labels=None)):
        for event in events.layers:
            assert list(event.group_rows) == [f"site {site}"]
            (values,) = event.group_gradient.values()
            total = sum(g[event.layer] for g in by_sample(case, site))
            assert values[0] == pytest.approx(float(torch.linalg.matrix_norm(total, 2)), rel=1e-5)


def test_rows_of_several_passes_have_no_groups_and_are_the_site_s_all_the_same():
    case, why = CASES["wide"], "which sample each row is of is not known"
    for events in recorded(case, passes=2):
        assert [event.group_rows for event in events.layers] == [None, None]
        assert [event.unmeasured["group_rows"] for event in events.layers] == [why, why]
    once, twice = (recorded(case, labels=None, passes=passes) for passes in (1, 2))
    for one, other in zip(once, twice, strict=True):
        for event, again in zip(one.layers, other.layers, strict=True):
            for label, values in event.group_gradient.items():
                found = again.group_gradient[label][: len(values)]
                assert found == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "method", "layer", "why"),
    [
        ("tied", EXACT, "embed.weight", "its rows were not captured"),
        ("wide", og.Dense(), "0.weight", "its rows were not captured"),
    ],
)
def test_where_groups_cannot_be_told_apart_it_is_said_why(name, method, layer, why):
    for events in recorded(CASES[name], method):
        (event,) = (e for e in events.layers if e.layer == layer)
        assert event.group_gradient is None
        assert event.unmeasured["group_rows"] == why


def test_labels_are_for_one_forward():
    case = CASES["wide"]

    def body(rank, group):
        model, events = copy.deepcopy(case.model), Told()
        session = og.distribute(model, EXACT, group=group, recorder=events)
        session.groups(LABELS[rank])
        for _ in range(2):
            loss_of(model, case.batches[rank]).backward()
        session.detach()
        return events

    for events in run_on_lasting_groups(SITES, body):
        first, *_, second = (e for e in events.layers if e.layer == "0.weight")
        assert first.group_rows is not None
        assert second.unmeasured["group_rows"] == (
            "the forward was given no labels by session.groups()"
        )


def test_who_does_not_ask_hears_of_no_groups_and_may_give_none():
    case = CASES["wide"]
    for events in recorded(case, labels=None, recorder=Events):
        for event in events.layers:
            assert event.group_rows is event.group_gradient is event.group_deltas is None
            assert "group_rows" not in (event.unmeasured or {})

    def body(rank, group):
        session = og.distribute(copy.deepcopy(case.model), EXACT, group=group, recorder=Events())
        with pytest.raises(RuntimeError, match=r"groups=True"):
            session.groups(LABELS[rank])
        session.detach()

    run_on_lasting_groups(SITES, body)


def test_other_labels_than_samples_are_refused():
    case = CASES["wide"]

    def body(rank, group):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, EXACT, group=group, recorder=Told())
        with pytest.raises(TypeError, match=r"session\.groups\(\): a float is no id"):
            session.groups([0.5] * 5)
        session.groups(["a"])
        with pytest.raises(ValueError, match=r"session\.groups\(\): 1 ids were given"):
            model(case.batches[rank])
        session.detach()
        assert type(model) is type(case.model)

    run_on_lasting_groups(SITES, body)


def test_values_of_rows_in_half_precision_are_not_rounded_again():
    """Deltas near the smallest number of float16, times the inverse of five sites."""
    d_GNO, a_GNI = (1e-7 * torch.randn(1, 6, 8)).half(), torch.randn(1, 6, 5).half()
    spectra = GroupSpectra("site 0", SPECTRUM, labelled=False)
    spectra.add(Slot("", "weight", 8, 5), [lambda: Factors(d_GNO, a_GNI)], 0.2)
    (found,) = spectra.measured("weight")["group_gradient"].values()
    wanted = 0.2 * torch.linalg.svdvals(d_GNO[0].double().mT @ a_GNI[0].double())
    assert found == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-12)


def test_gradients_are_the_same_bits_whoever_listens():
    case = CASES["conv"]

    def body(rank, group, recorder):
        model = copy.deepcopy(case.model)
        session = og.distribute(model, og.DAD(), group=group, recorder=recorder)
        if recorder is not None:
            session.groups(LABELS[rank])
        loss_of(model, case.batches[rank]).backward()
        session.detach()
        return [p.grad for p in model.parameters()]

    plain = run_on_lasting_groups(SITES, lambda r, g: body(r, g, None))
    told = run_on_lasting_groups(SITES, lambda r, g: body(r, g, Told()))
    for ours, theirs in zip(plain, told, strict=True):
        assert all(map(torch.equal, ours, theirs))
