"""Evaluations reach the recorders, change nothing, and a record says who and how."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from cases import Events
from ranks import run_on_lasting_groups


def trained(rank, group, evaluate: bool, recorder=None):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    drawn = torch.Generator().manual_seed(rank)  # sites are threads, which share the global one
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=drawn))
    session = og.distribute(net, og.RankDAD(rank=2), group=group, recorder=recorder)
    for step in range(4):
        net.zero_grad()
        net(torch.randn(8, 6, generator=drawn)).square().mean().backward()
        if evaluate and (rank or step % 2):
            session.log_eval([0, 1, 1] * 5, torch.linspace(0, 1, 15))
    session.detach()
    return [p.grad for p in net.parameters()]


def test_sites_evaluate_when_they_like_and_no_bit_changes():
    def body(rank, group):
        events = Events()
        return trained(rank, group, True, events), trained(rank, group, False), events

    for rank, (with_it, without, events) in enumerate(run_on_lasting_groups(2, body)):
        assert all(map(torch.equal, with_it, without))
        found = [e for e in events if isinstance(e, og.events.Evaluation)]
        assert [e.step for e in found] == ([1, 2, 3, 4] if rank else [2, 4])
        assert {(e.rank, e.rows) for e in found} == {(rank, 15)}


def test_without_a_recorder_it_returns_the_same_figures():
    def body(rank, group):
        net = nn.Linear(2, 2)
        session = og.distribute(net, og.DAD(), group=group)
        told = session.log_eval([0, 1, 1], [0.1, 0.8, 0.9], metrics={"F1": 1.0})
        with pytest.raises(ValueError, match="p has the shape"):
            session.log_eval([0, 1, 1], [0.1])
        session.detach()
        return told

    (told,) = run_on_lasting_groups(1, body)
    assert str(told).startswith("3 rows, accuracy 1.000 [0.439, 1.000], auc 1.000")
    assert str(told).endswith("F1 1.000")


def test_a_run_says_what_travels_how_and_between_whom():
    def body(rank, group):
        events = Events()
        trained(rank, group, False, events)
        return events

    for events in run_on_lasting_groups(2, body):
        (run,) = [e for e in events if isinstance(e, og.events.Run)]
        assert run.transport == "torch.distributed (gloo), which encrypts nothing"
        assert run.buffers == dict.fromkeys(
            ["1.running_mean", "1.running_var", "1.num_batches_tracked"], "broadcast"
        )
        assert (run.transform, run.model) == ("", "torch.nn.modules.container.Sequential")
        assert run.python.startswith("3.")


def test_what_others_learn_is_told_once_as_coverage_says():
    def body(rank, group):
        events = Events()
        net = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 2))
        method = og.PerLayer({"1.*": og.Local(), "*": og.DAD(always=True)})
        session = og.distribute(net, method, group=group, recorder=events)
        for _ in range(3):
            net.zero_grad()
            net(torch.randn(4, 64)).square().mean().backward()
        coverage = session.coverage()
        session.detach()
        return events, coverage

    for events, coverage in run_on_lasting_groups(2, body):
        (told,) = [e for e in events if isinstance(e, og.events.Disclosure)]
        assert told.learn == {line.parameter: (line.travels, line.reveals) for line in coverage}
        assert told.learn["1.weight"] == ("local", "nothing")
        assert told.step == 0
