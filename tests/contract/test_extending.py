"""The examples of docs/extending.md work as they stand there."""

from __future__ import annotations

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import outergrad as og
from cases import relative_error
from places import REPOSITORY
from ranks import run_on_lasting_groups

PAGE = REPOSITORY / "docs" / "extending.md"


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
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    definitions, _ = code.split("session = ")
    names: dict = {}
    exec(compile(definitions, str(PAGE), "exec"), names)
    model, rules = names["model"], {**og.RULES, names["Transposed"]: names["TransposedRule"]()}
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
    tested = (REPOSITORY / "tests/contract/examples/queue_transport.py").read_text()
    assert tested.replace("  # noqa: E731", "").endswith(code)
