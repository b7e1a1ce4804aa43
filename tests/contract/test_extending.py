"""The examples of docs/extending.md work as they stand there."""

from __future__ import annotations

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from examples.signs import Signs
from examples.transposed import Transposed, TransposedRule
from torch import Tensor, nn

import outergrad as og
from cases import mlp, relative_error
from outergrad.core.coding import aligned
from outergrad.session.inspect import inspect
from places import REPOSITORY
from ranks import run_on_lasting_groups
from watched import Watched, residuals

PAGE = REPOSITORY / "docs" / "extending.md"
EXAMPLES = REPOSITORY / "tests" / "contract" / "examples"
STEPS, LR = 60, 0.05


def squared(model, x):
    return model(x).square().mean()


def penalised(model, x):
    """With slopes of the input, of which a rule needs to know nothing."""
    x = x.clone().requires_grad_()
    y = model(x).sin()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + slope.square().sum()


@pytest.mark.parametrize("loss_of", [squared, penalised])
def test_the_documented_rule_is_exact(loss_of):
    model, rules = nn.Sequential(Transposed(20, 30)), {**og.RULES, Transposed: TransposedRule()}
    batches = [torch.randn(4 + rank, 20) for rank in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.DAD(always=True), group=group, rules=rules)
        loss_of(replica, batches[rank]).backward()
        assert session.coverage()[0].travels == "factors"
        return replica[0].table.grad

    pooled = copy.deepcopy(model).double()
    for x in batches:
        (loss_of(pooled, x.double()) / 2).backward()
    for found in run_on_lasting_groups(2, body):
        assert relative_error(found, pooled[0].table.grad) < 1e-6


def test_the_documented_transport_shares_gradients():
    section = PAGE.read_text().split("## A transport")[1].split("\n## ")[0]
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    hub = names["Hub"](3)
    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(lambda rank: names["site"](hub, rank), range(3))
    assert first.norm() > 0
    assert all(torch.equal(first, other) for other in others)


def test_the_documented_transport_is_the_one_that_is_tested():
    section = PAGE.read_text().split("## A transport")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    tested = (EXAMPLES / "queue_transport.py").read_text()
    assert tested.endswith(code)
    assert len(code.splitlines()) < 60


@pytest.mark.parametrize("name", ["transposed", "signs", "settling", "int4"])
def test_a_documented_example_is_the_tested_file_and_short(name):
    code = (EXAMPLES / f"{name}.py").read_text()
    assert code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(code.splitlines()) < 60


@dataclass
class Seen:
    """What one site saw of a training by signs."""

    losses: list[float]
    gradients: list[Tensor]
    owed: Tensor
    weight: Tensor
    travels: dict[str, str]
    sent_bytes: int


def train_by_signs(original, target_OI, rank, group) -> Seen:
    """With the gradients of the first weight as this site alone has them, in float64."""
    model, twin = copy.deepcopy(original), copy.deepcopy(original).double()
    watched, generator = Watched(Signs()), torch.Generator().manual_seed(rank)
    units = inspect(copy.deepcopy(original), Signs(), og.RULES).model.units
    session = og.distribute(model, watched, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, gradients = [], []
    for _ in range(STEPS):
        x = torch.randn(16, 20, generator=generator)
        twin.load_state_dict(model.state_dict())
        twin.zero_grad()
        (twin(x.double()) - x.double() @ target_OI.double().T).square().mean().backward()
        gradients.append(twin[0].weight.grad.clone())
        optimizer.zero_grad()
        loss = (model(x) - x @ target_OI.T).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    owed = residuals(watched.made[0], units)["0.weight"][0]
    travels = {line.parameter: line.travels for line in session.coverage()}
    sent_bytes = session.stats().layers["0.weight"].sent_bytes
    session.detach()
    return Seen(losses, gradients, owed, model[0].weight.detach(), travels, sent_bytes)


@pytest.mark.parametrize("sites", [2, 3])
def test_the_documented_method_trains(sites):
    """A bit per entry and a scale; nothing that the signs lose is lost for good."""
    original, target_OI = mlp(20, 40, 4), torch.randn(4, 20)
    found = run_on_lasting_groups(sites, lambda *own: train_by_signs(original, target_OI, *own))
    for seen in found:
        assert sum(seen.losses[-5:]) < 0.3 * sum(seen.losses[:5])
        compressed = dict.fromkeys(("0.weight", "2.weight"), "compressed")
        assert seen.travels == compressed | dict.fromkeys(("0.bias", "2.bias"), "dense")
        assert seen.sent_bytes == (sites - 1) * (aligned(20 * 40 // 8) + aligned(4))
        assert seen.weight.equal(found[0].weight)
    applied = (original[0].weight.detach() - found[0].weight).double() / LR
    owed = sum(seen.owed.double() for seen in found) / sites
    expected = sum(sum(seen.gradients) for seen in found) / sites
    assert relative_error(applied + owed, expected) < 1e-5
    assert owed.norm() > 1e-3 * expected.norm()
