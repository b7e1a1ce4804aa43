"""What og.distribute(model) does where no method is named."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outergrad as og
from cases import mlp, relative_error
from meshes import run_mesh
from outergrad.session import attach
from ranks import run_on_lasting_groups

START = mlp(24, 32, 16, 4)


class OnlyParameters(nn.Module):
    """No layer with a rule: there is nothing to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 12)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


@dataclass(frozen=True)
class Halved:
    """A transform."""

    needs_samples: bool = False
    needs_all_layers: bool = False

    def __call__(self, given: Any) -> Any:
        return given


def batch(rank: int, width: int) -> Tensor:
    return torch.randn(6, width, generator=torch.Generator().manual_seed(rank))


def pooled(model: nn.Module, width: int, sites: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model).double()
    for rank in range(sites):
        ((model(batch(rank, width).double()) ** 2).mean() / sites).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sites", [1, 2, 3])
@pytest.mark.parametrize(("start", "width"), [(START, 24), (OnlyParameters(), 4)])
def test_every_gradient_is_the_mean_from_the_first_step_on(start, width, sites):
    expected = pooled(start, width, sites)

    def body(rank, group):
        model = copy.deepcopy(start)
        session = og.distribute(model, group=group)
        for k in range(9):
            model.zero_grad()
            (model(batch(rank, width)) ** 2).mean().backward()
            for name, p in model.named_parameters():
                assert relative_error(p.grad, expected[name]) < 5e-6, (k, name)
        session.detach()

    run_on_lasting_groups(sites, body)


def test_it_is_auto_and_can_be_frozen():
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, group=group)
        for _ in range(8):
            (model(batch(rank, 24)) ** 2).mean().backward()
        choice, table = session.choice(), str(session.coverage())
        session.detach()
        again = og.distribute(model, og.Auto(frozen=choice), group=group)
        again.detach()
        return choice, table

    for choice, table in run_on_lasting_groups(2, body):
        assert set(choice.values()) <= {og.Dense(), og.DAD()}
        assert choice.keys() == dict(START.named_parameters()).keys()
        assert table.count("Auto: ") == len(choice)


@pytest.mark.parametrize(("start", "sites"), [(START, 1), (OnlyParameters(), 2)])
def test_nothing_is_measured_where_there_is_nothing_to_choose(start, sites, monkeypatch):
    def fails(comm):
        raise AssertionError("measured")

    monkeypatch.setattr(attach, "measured_link", fails)
    monkeypatch.setattr(attach, "measured_flops", fails)

    def body(rank, group):
        session = og.distribute(copy.deepcopy(start), group=group)
        measures = session._choosing is not None
        choice = session.choice()
        session.detach()
        return measures, choice.keys()

    for measures, names in run_on_lasting_groups(sites, body):
        assert not measures
        assert names == dict(start.named_parameters()).keys()


def test_with_a_transform_it_is_dad_and_the_table_says_so():
    def body(rank, group):
        model = copy.deepcopy(START)
        session = og.distribute(model, group=group, transform=Halved())
        (model(batch(rank, 24)) ** 2).mean().backward()
        table = session.coverage()
        session.detach()
        return table

    for table in run_on_lasting_groups(2, body):
        assert all("og.DAD() by default, not og.Auto(): transform=" in line.why for line in table)


def test_with_a_mesh_it_is_dad_and_the_table_says_so():
    def body(mesh):
        session = og.distribute(copy.deepcopy(START), mesh=mesh)
        table = session.coverage()
        session.detach()
        return table

    for table in run_mesh(2, 1, body):
        assert all("og.DAD() by default, not og.Auto(): the ranks" in line.why for line in table)


def test_what_is_named_is_taken():
    def body(rank, group):
        session = og.distribute(copy.deepcopy(START), og.DAD(), group=group)
        table = str(session.coverage())
        with pytest.raises(RuntimeError, match="Auto"):
            session.choice()
        session.detach()
        return table

    for table in run_on_lasting_groups(2, body):
        assert "Auto" not in table
