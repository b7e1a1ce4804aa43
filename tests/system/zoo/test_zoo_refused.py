"""What a model of another library does that no block can do: an error says so."""

from __future__ import annotations

import pytest
import torch
from zoo_runs import SITES
from zoo_text import mixtral, text

import outergrad as og
from ranks import run_on_lasting_groups


def test_a_balancing_loss_beside_whole_layers_is_refused():
    """The experts' scores leave the layers through hooks: a replay would not see their gradient."""
    models = [mixtral() for _ in range(SITES)]

    def body(rank, group):
        method = og.EDAD(blocks=("model.layers.*",), inputs="raw", always=True)
        session = og.distribute(models[rank], method, group=group)
        batch = text(torch.Generator().manual_seed(rank), rank)
        with pytest.raises(RuntimeError, match=r"block 'model\.layers\.\d'.*mlp\.gate.*gradient"):
            models[rank](**batch).loss.backward()
        session.detach()

    run_on_lasting_groups(SITES, body)
