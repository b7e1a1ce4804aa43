"""What the table says of layers that travel dense."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups


@pytest.mark.parametrize(("batch", "rows"), [(16, "9,216"), (3, "1,728")])
def test_rows_are_all_that_there_were(batch, rows):
    """Not what a header says: that is rounded up, and no more than would ever pay."""

    def body(rank, group):
        net = nn.Sequential(nn.Conv2d(1, 16, 5), nn.Flatten(), nn.Linear(9216, 10))
        session = og.distribute(net, og.DAD(), group=group)
        for _ in range(2):
            net(torch.ones(batch, 1, 28, 28)).sum().backward()
        return {line.parameter: line.why for line in session.coverage()}

    for lines in run_on_lasting_groups(2, body):
        assert lines["0.weight"].startswith(f"{rows} rows here; ")


def test_rows_of_several_forwards_add_up():
    def body(rank, group):
        net = nn.Linear(4, 4)
        session = og.distribute(net, og.DAD(), group=group)
        for _ in range(2):
            (net(torch.ones(17, 4)).sum() + net(torch.ones(9, 4)).sum()).backward()
        return session.coverage()[0].why

    assert run_on_lasting_groups(2, body)[0].startswith("26 rows here; ")
