"""What the tests of recipes share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def one_site():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def data_dir() -> Path:
    """The folder of the real data sets."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("OUTERGRAD_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}: set OUTERGRAD_DATA")
    return folder
