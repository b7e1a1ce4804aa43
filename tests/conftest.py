"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from outergrad.methods.low_rank import settings as _settings
from places import DATA
from seeding import seed

# How long an example takes says more about the machine than about the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# A shell has what it starts in the background ignore SIGINT, and so would the commands of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """What is there before the first test stays: no garbage collection looks at it again.

    Hundreds of thousands of objects cost half a second in each of those that tests ask for.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks():
    """Fails a test that leaves a thread of a rank or a default process group behind."""
    seed(0)
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("rank ")]
    assert not left, f"threads left: {left}"
    assert not dist.is_initialized(), "a default process group was left"


@pytest.fixture
def large_matrices(monkeypatch):
    """Takes the small matrices of tests for large ones, of which low rank is found in factors."""
    monkeypatch.setattr(_settings, "_SMALL", 0)


@pytest.fixture(autouse=True, scope="session")
def one_thread_per_rank():
    """Ranks are threads here: more would only fight for the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """What tests keep on disk goes away with them, unless OUTERGRAD_CACHE says where."""
    os.environ.setdefault("OUTERGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def one_site():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def data_dir():
    """The folder of the real data sets."""
    if not (DATA / "mnist").is_dir():
        pytest.skip(f"no mnist in {DATA}: set OUTERGRAD_DATA")
    return DATA
