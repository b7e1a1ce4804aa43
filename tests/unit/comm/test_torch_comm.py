"""Messages from every site to every other."""

from __future__ import annotations

import pytest
import torch

from outergrad.comm.torch import TorchComm
from ranks import run_on_lasting_groups

CPU = torch.device("cpu")


def part(sender: int, receiver: int) -> torch.Tensor:
    """Another length and content for every pair."""
    return torch.arange(1 + 3 * sender + receiver, dtype=torch.int32) + 100 * sender


@pytest.mark.parametrize("sites", [1, 2, 3, 4])
def test_every_site_gets_what_is_for_it(sites):
    def body(rank, group):
        comm = TorchComm(group, CPU)
        parts = [part(rank, receiver) for receiver in range(sites)]
        works = [comm.all_to_all(parts, [len(part(s, rank)) for s in range(sites)])]
        works.append(comm.all_gather(parts[0], [len(part(s, 0)) for s in range(sites)]))
        return [work.wait() for work in works], comm.sent_bytes

    for rank, ((to_me, to_all), sent_bytes) in enumerate(run_on_lasting_groups(sites, body)):
        for sender in range(sites):
            assert to_me[sender].equal(part(sender, rank))
            assert to_all[sender].equal(part(sender, 0))
        others = [part(rank, receiver).nbytes for receiver in range(sites) if receiver != rank]
        assert sent_bytes == sum(others) + (sites - 1) * part(rank, 0).nbytes
