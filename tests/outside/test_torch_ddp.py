"""PyTorch's tests of DistributedDataParallel, by our methods behind its surface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="PyTorch's tests need it")

from ddp import METHODS
from torch_tests_on_cpus import TIMEOUT_S, of_ddp

from covering import LONG, covering

HOOKS = "compresses by a hook of DDP's, in whose place stand methods here"
INSIDE = "asks for DDP's buckets, log entries or profiled collectives"
STRICT = "wants an error where DDP cannot follow a changing graph; here the gradient is exact"
GPU = "needs GPUs"
NOT_ABOUT_US = {
    "test_DistributedDataParallel_non_default_stream": GPU,
    "test_accumulate_gradients_no_sync_allreduce_hook": HOOKS,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": HOOKS,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": INSIDE,
    "test_ddp_broadcast_buffer_via_hook": HOOKS,
    "test_ddp_broadcast_buffers_deprecation_warning": "wants a warning about DDP's arguments",
    "test_ddp_bucket_cap_mb_list": INSIDE,
    "test_ddp_buffer_hook_allreduce": HOOKS,
    "test_ddp_buffer_hook_allreduce_return_future": HOOKS,
    "test_ddp_build_debug_param_to_name_mapping": INSIDE,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": INSIDE,
    "test_ddp_comm_hook_logging": HOOKS,
    "test_ddp_control_flow_different_across_ranks": STRICT,
    "test_ddp_control_flow_same_across_ranks": STRICT,
    "test_ddp_device": GPU,
    "test_ddp_has_finalized": INSIDE,
    "test_ddp_hook_parity_allreduce": HOOKS,
    "test_ddp_hook_parity_allreduce_process_group": HOOKS,
    "test_ddp_hook_parity_post_localSGD": HOOKS,
    "test_ddp_hook_parity_powerSGD": HOOKS,
    "test_ddp_hook_pickling_powerSGD": HOOKS,
    "test_ddp_logging_data_cpu": INSIDE,
    "test_ddp_logging_data_gpu": INSIDE,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": STRICT,
    "test_ddp_multiple_nested_unused_params_error": STRICT,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": GPU,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": GPU,
    "test_ddp_native_mixed_precision_ignored_params": "casts by an option of DDP's",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": GPU,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": GPU,
    "test_ddp_profiling_autograd_profiler": INSIDE,
    "test_ddp_profiling_execution_trace": INSIDE,
    "test_ddp_profiling_torch_profiler": INSIDE,
    "test_ddp_python_error_logged": HOOKS,
    "test_ddp_remove_autograd_hooks": INSIDE,
    "test_ddp_sync_bn_training_vs_eval": "PyTorch skips it, because it fails",
    "test_ddp_unused_params_rebuild_buckets_exception": STRICT,
    "test_get_data_parallel_params": INSIDE,
    "test_invalid_static_graph": STRICT,
    "test_static_graph_api_cpu": STRICT,
}
"""What says nothing of a training loop behind another surface, and why."""
DIFFER = {
    "test_ddp_create_graph": "create_graph=True is refused: gradients of other sites have no graph",
    "test_ddp_uneven_inputs": "join has no throw_on_early_termination",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": "join has no throw_on_early_termination",
}
"""Those that do not pass, and why."""
TAKES_MINUTES = "test_ddp_uneven_inputs"
"""Of these: a site waits for another in vain."""
DIFFER_BY_FACTORS = {
    "test_ddp_sink_noclone": "factors of a layer's first two steps are compared with copies",
}
"""Those that do not pass by methods that send factors, and why."""
FACTORS = [method for method in METHODS if method not in ("dense", "powersgd")]


class Ranks:
    """Two processes that run tests together, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, 0
        self._ranks: list[subprocess.Popen[str]] = []

    def _start(self) -> None:
        here = Path(__file__).parent
        folder = self._folder / str(self._started)
        for name in ("barrier", "test_dir", "init_dir"):
            (folder / name).mkdir(parents=True)
        self._started += 1
        about = [sys.executable, str(here / "torch_tests_on_cpus.py")]
        self._ranks = [
            subprocess.Popen(
                [*about, str(rank), "2", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]

    def run(self, test: str, method: str) -> list[str]:
        """What went wrong on each rank; nothing if the test passed."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"test": test, "method": method}) + "\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(answers):
            self.end()
        return [json.loads(a)["error"] if a else "its process ended" for a in answers]

    def end(self) -> None:
        for rank in self._ranks:
            with rank:
                rank.kill()
        self._ranks = []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.end()


ABOUT_US = [name for name in of_ddp() if name not in NOT_ABOUT_US]
PASSING = [name for name in ABOUT_US if name not in DIFFER]
PASSING_BY_ALL = [name for name in PASSING if name not in DIFFER_BY_FACTORS]


def test_all_but_four_pass_by_every_method():
    assert len(PASSING_BY_ALL) >= 58
    assert {*NOT_ABOUT_US, *DIFFER, *DIFFER_BY_FACTORS} <= {*of_ddp()}


@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize(("method", "test"), covering([*METHODS], PASSING, quick=0, every=6))
def test_a_test_of_ddps(ranks, test, method):
    errors = [error for error in ranks.run(test, method) if error]
    differs = test in DIFFER_BY_FACTORS and method in FACTORS
    assert bool(errors) == differs, (errors or ["it passes now"])[0]


@pytest.mark.slow
@pytest.mark.timeout(4 * TIMEOUT_S)
@pytest.mark.parametrize("test", [test for test in DIFFER if LONG or test != TAKES_MINUTES])
def test_what_differs_still_does(ranks, test):
    assert any(ranks.run(test, "dense"))
