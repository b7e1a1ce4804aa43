"""PyTorch's own tests of collectives and of DDP pass through a hub.

`over_the_star.py` runs all of them, over gloo as well.
"""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="PyTorch's tests need it")
pytest.importorskip("grpc", reason="a hub needs grpcio")

from over_the_star import SITES, Ranks, hub
from torch_tests_on_cpus import all_tests

CHOSEN = [
    name
    for name in dict.fromkeys(all_tests())
    if name.startswith(
        (
            *("test_all_gather_coalesced", "test_all_gather_object", "test_all_gather_into_cat"),
            *(
                "test_all_reduce_",
                "test_all_to_all",
                "test_barrier_timeout_full",
                "test_broadcast_",
            ),
            *("test_gather", "test_reduce_m", "test_reduce_scatter_tensor", "test_scatter"),
            *("test_send_recv", "test_isend", "test_irecv", "test_DistributedDataParallelCPU"),
            *("test_ddp_join", "test_ddp_grad_div", "test_ddp_hook_parity_powerSGD"),
            *("test_ddp_control_flow", "test_ddp_namedtuple", "test_ddp_static_graph_nested"),
            *("test_ddp_broadcast_buffer", "test_static_graph"),
        )
    )
    and not name.endswith(("_cuda", "_nccl", "_profiler", "_nccl_autograd_profiler"))
    and "nccl" not in name
]


@pytest.fixture(scope="module")
def ranks():
    with hub(SITES) as server:
        ranks = Ranks("star", server.port)
        yield ranks
        ranks.end()


@pytest.mark.parametrize("test", CHOSEN)
def test_it_passes_through_a_hub(ranks, test):
    assert ranks.run(test) is None
