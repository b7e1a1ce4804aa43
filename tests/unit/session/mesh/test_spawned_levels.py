"""Two levels and FSDP2 in processes, with PyTorch's own DeviceMesh."""

from __future__ import annotations

import pytest
import torch.multiprocessing as mp

import spawned_ranks
from outergrad.launch.loopback import on_loopback

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_device_meshes_shards_and_a_rank_that_dies(tmp_path):
    with on_loopback():
        args = str(tmp_path / "store"), str(tmp_path / "said")
        mp.spawn(spawned_ranks.check_all, args, nprocs=4)
    for rank in (1, 2, 3):
        assert " lost " in (tmp_path / f"said{rank}").read_text()
