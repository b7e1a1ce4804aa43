"""What sites save beside a checkpoint, where their number has changed or a file is missing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import outergrad as og
from cases import mlp
from outergrad.integrations._sites import needed, resume, site_state
from ranks import run_on_lasting_groups

MODEL = torch.nn.Sequential(mlp(6, 12, 12), torch.nn.BatchNorm1d(12))
METHOD = og.RankDAD(rank=1)


@pytest.fixture
def alone():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def saved():
    """By each of two sites, after two steps."""
    batches = [torch.randn(5 + k, 6) for k in range(2)]

    def body(rank, group):
        model = copy.deepcopy(MODEL)
        session = og.distribute(model, METHOD, group=group)
        for _ in range(2):
            model(batches[rank]).square().mean().backward()
        session.detach()
        return site_state(session, model, [])

    return run_on_lasting_groups(2, body)


def test_a_site_reads_its_own_file_alone(saved):
    def read(rank):
        return saved[1] if rank == 1 else pytest.fail("not its file")

    assert needed(read, 1, 2) == [saved[1]]


def test_shared_weights_are_not_in_it(saved):
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(set(state["model"]) == names for state in saved)


def test_fewer_sites_go_on_from_the_files_of_all(saved, alone):
    assert needed(saved.__getitem__, 0, 1) == saved
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, METHOD)
    resume(saved.__getitem__, session, model, [])
    assert session.stats().step == 2
    assert torch.equal(model[1].running_mean, saved[0]["model"]["1.running_mean"])
    session.detach()


def test_a_file_that_is_missing_then_is_named(saved, alone):
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, METHOD)
    with pytest.raises(FileNotFoundError, match=r"one of 2 sites, now there are 1.*sites \[1\]"):
        resume({0: saved[0]}.get, session, model, [])
    session.detach()


def test_no_file_at_all_is_a_warning(alone):
    model = copy.deepcopy(MODEL)
    session = og.distribute(model, METHOD)
    with pytest.warns(UserWarning, match="what methods remember starts anew"):
        resume({}.get, session, model, [])
    session.detach()
