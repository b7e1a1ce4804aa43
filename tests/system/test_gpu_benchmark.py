"""benchmarks/gpu.py with tiny shapes on the CPU: every row, and one line for what cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from places import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
KERNELS = ["kernels", "--device", "cpu", "--sizes", "8", "--rows", "1", "--repeats", "2"]
STEP = ["step", "--device", "cpu", "--vocab", "31", "--width", "16", "--depth", "1", "--heads", "2"]
STEP += ["--positions", "8", "--batch", "2", "--rounds", "2", "--steps", "2"]

pytestmark = pytest.mark.slow


@pytest.fixture
def benches(monkeypatch):
    """The program and its benches as modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu
    import gpu_kernels
    import gpu_step

    on_term = signal.getsignal(signal.SIGTERM)
    yield gpu, gpu_kernels, gpu_step
    signal.signal(signal.SIGTERM, on_term)


@pytest.fixture
def main(benches, monkeypatch):
    """Runs the program in this process; returns its exit status."""

    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu.py", *args])
        try:
            return benches[0].main()
        except SystemExit as ended:
            return ended.code

    return run


def figures(*args: str, file: Path) -> tuple[str, dict]:
    """The output of a process that succeeds, and what it wrote."""
    command = [
        sys.executable,
        "-W",
        "error",
        str(BENCHMARKS / "gpu.py"),
        *args,
        "--json",
        str(file),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(file.read_text())


def assert_positive(row: dict) -> None:
    low, high = row["quartiles_ms"]
    assert 0 < low <= row["median_ms"] <= high


def test_kernels_time_every_weight_batch_and_method(tmp_path, benches):
    _, kernels, _ = benches
    args = ["kernels", "--device", "cpu", "--sizes", "16", "24", "--rows", "2", "12", "--verify"]
    shown, found = figures(*args, "--repeats", "3", file=tmp_path / "figures")
    rows = {(row["size"], row["rows"], row["method"]): row for row in found["rows"]}
    assert list(rows) == list(product([16, 24], [2, 12], kernels.METHODS))
    for (_, batch, method), row in rows.items():
        dense = batch == 12 and method.startswith("canonical")
        assert row["status"] == ("dense" if dense else "ok")
        if not dense:
            assert_positive(row)
            assert row["ratio_to_wgrad"] > 0
    assert shown.count("verified: ") == len(found["checks"]) == 6
    assert len(shown.splitlines()) == 1 + 6 + 1 + len(rows)
    assert " ".join(args) in found["command"]
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["cpu"]


def test_a_step_is_timed_with_every_method(tmp_path, benches):
    _, _, step = benches
    shown, found = figures(*STEP, file=tmp_path / "figures")
    assert [row["method"] for row in found["rows"]] == list(step.METHODS)
    for row in found["rows"]:
        assert row["status"] == "ok"
        assert [len(block) for block in row["blocks_ms"]] == [2, 2]
        assert_positive(row)
        assert row["ratio_to_ddp"] > 0
    assert len(shown.splitlines()) == 2 + len(found["rows"])


@pytest.mark.parametrize("args", [[*KERNELS, "--dtype", "bf16", "--verify"], [*STEP, "--autocast"]])
def test_half_precision(main, capsys, args):
    assert main(*args) == 0
    headline, *_ = capsys.readouterr().out.splitlines()
    assert headline.endswith("bf16")


def test_a_wrong_product_is_found(benches, main, monkeypatch, capsys):
    _, kernels, _ = benches
    monkeypatch.setattr(kernels, "orthonormal", lambda p: p)
    assert "PowerSGD at full rank" in main(*KERNELS, "--verify")
    assert "median" not in capsys.readouterr().out


MISTAKES = {
    "device": (["kernels", "--device", "abacus"], "invalid choice: 'abacus'"),
    "size": (["kernels", "--sizes", "0"], "'0' is not a whole number above 0"),
    "method": (["kernels", "--device", "cpu", "--methods", "magic"], "no method 'magic'"),
    "tf32": (["kernels", "--device", "cpu", "--tf32"], "--tf32 is for fp32 on CUDA"),
    "json": (["step", "--device", "cpu", "--json", "no/where"], "no such folder"),
    "heads": (["step", "--device", "cpu", "--heads", "5"], "no multiple of --heads 5"),
    "backend": (["step", "--device", "cpu", "--backend", "nccl"], "nccl is for CUDA"),
    "cuda": (["step"], "PyTorch finds no CUDA device here: use --device cpu"),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(main, monkeypatch, capsys, args, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(*args) == 2
    out, err = capsys.readouterr()
    assert err.startswith("gpu.py: ")
    assert said in err
    assert err.count("\n") == 1
    assert not out


def test_a_weight_too_large_loses_no_other(main, capsys):
    sizes = ["--sizes", "8", "7000000"]
    assert main(*KERNELS, *sizes, "--methods", "wgrad", "powersgd-1") == 0
    table = capsys.readouterr().out
    assert table.count("out of memory") == 2
    assert len(table.splitlines()) == 2 + 4


def test_a_method_that_fails_loses_no_other(benches, main, monkeypatch, capsys):
    failing = {
        "greedy": raising(torch.OutOfMemoryError("CUDA out of memory.")),
        "broken": raising(RuntimeError("so it is\nat length")),
    }
    monkeypatch.setattr(benches[2], "METHODS", {**failing, "alone": lambda model: model})
    assert main(*STEP) == 1
    greedy, broken, alone = capsys.readouterr().out.splitlines()[2:]
    assert greedy.split() == ["greedy", "out", "of", "memory"]
    assert broken.split() == ["broken", "failed:", "so", "it", "is"]
    assert float(alone.split()[1]) > 0
    assert not dist.is_initialized()


def raising(error: Exception):
    def attach(_: torch.nn.Module) -> torch.nn.Module:
        raise error

    return attach


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has(tmp_path, benches, main, monkeypatch, capsys, signum):
    _, kernels, _ = benches
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background
    stop = {"stop": lambda _: lambda *_: signal.raise_signal(signum)}
    monkeypatch.setattr(kernels, "METHODS", {"wgrad": kernels.METHODS["wgrad"], **stop})
    file = tmp_path / "figures"
    try:
        assert main(*KERNELS, "--json", str(file)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    shown, said = capsys.readouterr()
    assert "wgrad" in shown
    assert said == "\ngpu.py: interrupted\n"
    assert [row["method"] for row in json.loads(file.read_text())["rows"]] == ["wgrad"]
