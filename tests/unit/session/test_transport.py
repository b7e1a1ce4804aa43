"""What `transport=` goes with, and that nothing else opens one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from ranks import run_on_lasting_groups

CPU = torch.device("cpu")


class Unopened:
    """A transport that goes by no setting of `distribute`."""

    settings = frozenset()

    def open(self, device):
        raise AssertionError("opened")


class Mesh:
    mesh_dim_names = ("site", "local")


REFUSED = {
    "group": ({"group": object()}, "group= and transport=Unopened.*leave it out"),
    "timeout": ({"timeout": 3.0}, "timeout= and transport=Unopened.*leave it out"),
    "mesh": ({"mesh": Mesh()}, "mesh= with transport=Unopened.*leave one of them out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_transport_does_not_go_by_is_refused(case):
    settings, match = REFUSED[case]
    with pytest.raises(ValueError, match=match):
        og.distribute(nn.Linear(2, 2), transport=Unopened(), **settings)


def test_without_a_process_group_the_default_says_what_to_do():
    with pytest.raises(RuntimeError, match="init_process_group"):
        og.distribute(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="init_process_group"):
        og.TorchDistributed().open(CPU)


def test_the_one_that_is_given_is_what_a_session_sends_through():
    x = torch.randn(2, 3, 4)

    class Kept(og.TorchDistributed):
        def open(self, device, **settings):
            self.comm = super().open(device, **settings)
            return self.comm

    def body(rank, group):
        kept, model = Kept(), nn.Linear(4, 2)
        session = og.distribute(model, transport=kept, group=group, timeout=3.0)
        model(x[rank]).sum().backward()
        assert kept.comm.patience_s == 3.0
        assert session.stats().total_sent_bytes == kept.comm.sent_bytes > 0
        session.detach()

    run_on_lasting_groups(2, body)
