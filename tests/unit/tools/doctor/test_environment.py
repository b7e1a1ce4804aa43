from __future__ import annotations

import pytest

from outergrad.tools.doctor.findings import Level
from outergrad.tools.doctor.machine import (
    VARIABLES,
    check_room,
    check_shaping,
    check_threads,
    check_variables,
)

BITES = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "OFF"),
    "CUDA_LAUNCH_BLOCKING": ("1", "0"),
    "GLOO_DEVICE_TRANSPORT": ("TCP_TLS", "TCP"),
    "CUDA_VISIBLE_DEVICES": ("", "0"),
    "NCCL_DEBUG": ("INFO", "WARN"),
    "NCCL_SOCKET_IFNAME": ("eth1", None),
    "NCCL_P2P_DISABLE": ("1", "0"),
    "NCCL_IB_DISABLE": ("1", "0"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_bites_is_named(name):
    bad, good = BITES[name]
    (finding,) = check_variables({name: bad})
    assert finding.level > Level.OK
    assert name in finding.said
    if good is not None:
        assert [f.level for f in check_variables({name: good})] == [Level.OK]


def test_debug_says_what_it_costs():
    (finding,) = check_variables({"TORCH_DISTRIBUTED_DEBUG": "detail"})
    assert "8 ms" in finding.said


@pytest.mark.parametrize(
    ("threads", "cores", "processes", "level", "remedy"),
    [
        (8, 8, 1, Level.OK, ""),
        (1, 8, 1, Level.NOTE, "export OMP_NUM_THREADS=8, if one site runs here"),
        (1, 8, 2, Level.NOTE, "export OMP_NUM_THREADS=4"),
        (8, 8, 2, Level.WARNING, "export OMP_NUM_THREADS=4"),
        (1, 2, 4, Level.OK, ""),
    ],
)
def test_threads(threads, cores, processes, level, remedy):
    (finding,) = check_threads({}, threads, cores, processes)
    assert (finding.level, finding.remedy) == (level, remedy)


def test_one_thread_is_right_where_every_core_has_a_site():
    (alone,) = check_threads({}, 1, 2, 1)
    assert "right for 2 sites on this machine" in alone.said
    (both,) = check_threads({"TORCHELASTIC_RUN_ID": "1"}, 1, 2, 2)
    assert both.level == Level.OK


def test_torchrun_is_blamed_for_its_one_thread():
    (finding,) = check_threads({"TORCHELASTIC_RUN_ID": "1"}, 1, 8, 2)
    assert "torchrun sets OMP_NUM_THREADS=1" in finding.said


def test_limits():
    for most_files, level in ((64, Level.WARNING), (None, Level.OK), (1024, Level.OK)):
        files, _ = check_room(most_files, "/tmp", 10**10)
        assert files.level == level
    for free_bytes, level in ((10**6, Level.WARNING), (10**10, Level.OK)):
        _, disk = check_room(None, "/tmp", free_bytes)
        assert disk.level == level
    (shaped,) = check_shaping(None)
    assert shaped.level == Level.OK
    (unshaped,) = check_shaping("--link 100mbit needs root: run as root")
    assert "needs root" in unshaped.said
