"""The example of docs/extending.md works as it stands there."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch

import outergrad as og
from cases import relative_error
from ranks import run_on_lasting_groups

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def test_the_documented_rule_is_exact():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    definitions, _ = code.split("session = ")
    names: dict = {}
    exec(compile(definitions, str(PAGE), "exec"), names)
    model, rules = names["model"], {**og.RULES, names["Transposed"]: names["TransposedRule"]()}
    batches = [torch.randn(4 + rank, 20) for rank in range(2)]

    def body(rank, group):
        replica = copy.deepcopy(model)
        session = og.distribute(replica, og.DAD(always=True), group=group, rules=rules)
        replica(batches[rank]).square().mean().backward()
        assert session.coverage()[0].travels == "factors"
        return replica[0].table.grad

    pooled = copy.deepcopy(model).double()
    for x in batches:
        (pooled(x.double()).square().mean() / 2).backward()
    for found in run_on_lasting_groups(2, body):
        assert relative_error(found, pooled[0].table.grad) < 1e-6
