from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from forked import forked_processes
from outergrad.launch.errors import RecipeError
from outergrad.launch.start import number_of_sites, run_sites, under_torchrun
from outergrad.launch.traffic import loopback_name


@pytest.fixture
def torchrun(monkeypatch):
    """The environment of a rank among three."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


def test_without_torchrun_the_user_decides():
    assert not under_torchrun()
    assert number_of_sites(4) == 4
    assert number_of_sites(None) == 2


def test_torchrun_decides(torchrun):
    assert number_of_sites(None) == 3
    assert number_of_sites(3) == 3


def test_two_numbers_of_sites_are_one_error(torchrun):
    with pytest.raises(RecipeError, match="--sites 2, but torchrun started 3: leave out --sites"):
        number_of_sites(2)


def meet() -> None:
    """What a local site finds."""
    assert dist.get_world_size() == 2
    assert os.environ.get("GLOO_SOCKET_IFNAME") == loopback_name()


@pytest.mark.slow
def test_local_sites_meet_on_the_loopback_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with forked_processes():
        run_sites(meet, 2)
