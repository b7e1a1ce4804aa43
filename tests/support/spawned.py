"""Two processes that find each other as those of torchrun do, for libraries that ask for that."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from forked import forked_processes
from outergrad.launch.processes import run_processes
from outergrad.launch.traffic import stay_on_loopback

T = TypeVar("T")
SITES = 2


def run_two(work: Callable[[Path], T], folder: Path) -> list[T]:
    """What the work returns in each of two processes of one group, which share a folder."""
    works = [partial(_member, work, folder, rank) for rank in range(SITES)]
    with forked_processes():
        return [pickle.loads(result) for result in run_processes(works, verbose=True)]


def _member(work: Callable[[Path], T], folder: Path, rank: int) -> bytes:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": SITES, "LOCAL_WORLD_SIZE": SITES}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", HF_HUB_OFFLINE="1")
    stay_on_loopback()
    torch.set_num_threads(1)
    store, limit = (folder / "store").as_uri(), timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SITES, timeout=limit)
    return pickle.dumps(work(folder))  # by value: the pipe itself would share memory of tensors
