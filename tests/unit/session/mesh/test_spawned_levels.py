"""Two levels and FSDP2 in processes, with PyTorch's own DeviceMesh."""

from __future__ import annotations

from multiprocessing import set_forkserver_preload

import pytest
import torch.multiprocessing as mp

import spawned_ranks
from forked import IMPORTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_device_meshes_shards_and_a_rank_that_dies(tmp_path):
    args = str(tmp_path / "store"), str(tmp_path / "said")
    set_forkserver_preload(IMPORTED)
    mp.start_processes(spawned_ranks.check_all, args, nprocs=4, start_method="forkserver")
    for rank in (1, 2, 3):
        assert " lost " in (tmp_path / f"said{rank}").read_text()
