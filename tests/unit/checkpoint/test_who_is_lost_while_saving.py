"""A checkpoint that loses a site names it on all others, as a step does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outergrad as og
from outergrad.step.transport_state import on_transport
from patience import distribute_then_hurry
from ranks import run_ranks


@pytest.mark.parametrize("does", ["save", "restore"])
@pytest.mark.parametrize("with_session", [True, False])
def test_who_is_lost(tmp_path, does, with_session):
    def body(rank, group):
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        session = distribute_then_hurry(model, group=group)
        model(torch.ones(2, 6)).sum().backward()
        session.flush()
        place = {"session": session} if with_session else {"group": group}
        checkpoints = og.Checkpoints(tmp_path / str(rank), model=model, **place)
        if rank == 2:
            on_transport(group).end_watching()
            session._at.comm.close()
            return None
        with pytest.raises(og.SiteLostError, match=rf"Checkpoints\.{does}") as caught:
            checkpoints.save(1) if does == "save" else checkpoints.restore()
        return caught.value.sites, caught.value.step

    found = run_ranks(3, body)
    assert [sites for sites, _ in found[:2]] == [(2,), (2,)]
