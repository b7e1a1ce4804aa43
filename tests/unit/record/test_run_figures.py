"""What is remembered of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from made_up_run import DENSE_BYTES, START, events, layer, watched
from outergrad.core.run_figures import (
    Series,
    Watched,
    WatchedSite,
    agreement,
    layer_lines,
    mean_over,
    scalars,
    speed,
    whole_cosine,
)
from outergrad.events import Layer, Run, Scalars, Step


def test_figures_of_all_sites():
    told = speed(watched(sites=2))
    assert told.step_s == pytest.approx(0.1)
    assert told.sent_bytes == 9_000
    assert told.bytes_per_s == pytest.approx(90_000)
    assert told.fewer == pytest.approx(DENSE_BYTES / 9_000)
    assert told.parts_s["wait"] == pytest.approx(9e-3)


def test_bytes_are_those_of_all_steps_not_of_recorded_ones():
    run = Watched()
    for event in events(0, 1, 100, 10, START):
        if isinstance(event, Step):
            event = replace(event, sent_bytes=0)
        run.take(event, heard=START)
    assert speed(run).sent_bytes == 9_000


def test_scalars_are_means_over_sites_and_the_loss_is_first():
    run = watched(sites=3)
    for rank in range(3):
        values = {"lr": 1e-3, "test loss": float(rank)}
        run.take(Scalars(rank=rank, step=200, time=START + 20, values=values), heard=START)
    curves = scalars(run)
    assert [*curves] == ["loss", "test loss", "accuracy", "lr"]
    assert curves["test loss"] == [1.0]


def test_a_site_that_is_behind_does_not_shake_the_mean():
    run = watched(sites=2)
    before = scalars(run)["loss"]
    ahead = Scalars(rank=0, step=201, time=START + 20, values={"loss": 50.0})
    run.take(ahead, heard=START)
    assert scalars(run)["loss"] == before


def test_of_a_layer_the_worst_site_counts():
    run = watched(sites=3)
    lines = {line.last.layer: line for line in layer_lines(run)}
    cosines = [layer(rank, 3, 190, "head.weight").cosine for rank in range(3)]
    assert lines["head.weight"].cosine == min(cosines)
    assert lines["encoder.0.weight"].relative_error == 0.2


def test_layers_that_send_most_are_first():
    sent = [line.mean("sent_bytes") for line in layer_lines(watched())]
    assert sent == sorted(sent, reverse=True)


def test_the_cosine_of_the_whole_gradient():
    own, mean = torch.randn(3, 20), torch.randn(3, 20)
    norms = [(a.norm().item(), b.norm().item()) for a, b in zip(own, mean, strict=True)]
    blank = layer(0, 2, 0, "head.weight")
    layers = [
        replace(blank, gradient_norm=a, mean_norm=b, cosine=(x @ y).item() / a / b)
        for (a, b), x, y in zip(norms, own, mean, strict=True)
    ]
    expected = torch.cosine_similarity(own.flatten(), mean.flatten(), dim=0).item()
    assert whole_cosine(layers) == pytest.approx(expected, abs=1e-5)
    assert whole_cosine([replace(blank, cosine=None)]) is None


def test_agreement_names_the_site_that_agrees_least():
    told = agreement(watched(sites=3))
    assert told is not None
    assert told.site == 2
    assert told.least < told.most
    assert len(told.history) == 20


def test_a_run_from_step_0_starts_afresh():
    run = watched(sites=2)
    again = events(0, 2, 1, 10, START + 100)
    run.take(again[0], heard=START + 100)
    site = run.sites[0]
    assert (site.step, site.layers, dict(site.scalars)) == (0, {}, {})
    assert run.sites[1].step == 200


def test_a_run_that_goes_on_forgets_what_it_does_again():
    site = watched().sites[0]
    site.take(replace(run_of(site), step=100, time=START + 60), heard=START + 60)
    assert site.step == 100
    assert max(site.scalars["loss"]) == 100
    ranks = next(iter(site.layers.values())).effective_rank
    assert max(ranks) == 90


def run_of(site: WatchedSite) -> Run:
    assert site.run is not None
    return site.run


def test_sites_of_an_earlier_run_with_more_are_left_out():
    run = watched(sites=4)
    for rank in range(2):
        run.take(events(rank, 2, 1, 10, START + 100)[0], heard=START + 100)
    assert [site.rank for site in run.sites] == [0, 1]


def test_without_the_beginning_the_rest_is_known():
    run = Watched()
    for event in events(0, 2, 100, 10, START)[1:]:
        run.take(event, heard=START)
    assert speed(run).sent_bytes == 9_000
    assert speed(run).fewer is None


def test_half_a_step_is_no_agreement():
    run = Watched()
    for event in events(0, 2, 1, 10, START):
        if isinstance(event, Layer):
            run.take(event, heard=START)
    assert agreement(run) is None


@pytest.mark.parametrize(("gap_s", "silent_after_s"), [(0.1, 10.0), (60.0, 180.0)])
def test_silence_is_much_longer_than_usual(gap_s, silent_after_s):
    site = WatchedSite(0)
    for step in range(5):
        time = START + gap_s * step
        site.take(Scalars(rank=0, step=step, time=time, values={}), heard=time)
    assert site.silence_s(site.heard + silent_after_s - 1) is None
    assert site.silence_s(site.heard + silent_after_s + 1) == pytest.approx(silent_after_s + 1)


def test_a_pause_between_runs_is_not_usual():
    site = watched().sites[0]
    heard = START + 100_000
    site.take(replace(run_of(site), step=200, time=heard), heard=heard)
    site.take(Scalars(rank=0, step=201, time=heard + 1, values={}), heard=heard + 1)
    assert site.silence_s(heard + 30) == 29


def test_a_mean_of_series_is_over_common_steps():
    a, b = Series(), Series()
    for step in range(4):
        a.add(step, 1.0)
    for step in range(1, 6):
        b.add(step, 3.0)
    assert mean_over([a, b]) == [2.0, 2.0, 2.0]
    assert mean_over([a, Series()]) == [1.0] * 4
    assert mean_over([]) == []
