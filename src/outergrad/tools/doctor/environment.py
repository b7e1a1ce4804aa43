"""Checks of environment variables, processor cores, files and tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outergrad.launch.console import amount
from outergrad.tools.doctor.findings import Finding, note, ok, warning

_LEAST_FILES = 256
_LEAST_DISK_BYTES = 1_000_000_000

_Check = Callable[[str], Finding | None]


def _debug(value: str) -> Finding | None:
    if value.upper() != "DETAIL":
        return None
    return warning(
        "variables",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL makes every exchange some 8 ms slower",
        "unset TORCH_DISTRIBUTED_DEBUG, unless you are looking for a hang",
    )


def _launch_blocking(value: str) -> Finding | None:
    if value in ("", "0"):
        return None
    return warning(
        "variables",
        "CUDA_LAUNCH_BLOCKING makes the processor wait for every kernel: training is much slower",
        "unset CUDA_LAUNCH_BLOCKING, unless you are looking for an error in a kernel",
    )


def _transport(value: str) -> Finding | None:
    if value.upper() == "TCP_TLS":
        return note("variables", "GLOO_DEVICE_TRANSPORT=TCP_TLS: every site must have it")
    return None


def _hidden_gpus(value: str) -> Finding | None:
    if value not in ("", "-1"):
        return None
    return note("variables", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it to train on one")


def _nccl_debug(value: str) -> Finding | None:
    if value.upper() not in ("INFO", "TRACE"):
        return None
    return note("variables", f"NCCL_DEBUG={value} writes a lot to the terminal", "unset NCCL_DEBUG")


def _nccl_interface(value: str) -> Finding | None:
    said = f"NCCL_SOCKET_IFNAME={value} is not for gloo, which heeds GLOO_SOCKET_IFNAME alone"
    return note("variables", said, "set both, where both are used")


def _slower_nccl(name: str, way: str) -> _Check:
    def check(value: str) -> Finding | None:
        if value in ("", "0"):
            return None
        return note(
            "variables", f"{name} forbids NCCL {way}", f"unset {name}, unless that is broken here"
        )

    return check


VARIABLES: dict[str, _Check] = {
    "TORCH_DISTRIBUTED_DEBUG": _debug,
    "CUDA_LAUNCH_BLOCKING": _launch_blocking,
    "GLOO_DEVICE_TRANSPORT": _transport,
    "CUDA_VISIBLE_DEVICES": _hidden_gpus,
    "NCCL_DEBUG": _nccl_debug,
    "NCCL_SOCKET_IFNAME": _nccl_interface,
    "NCCL_P2P_DISABLE": _slower_nccl("NCCL_P2P_DISABLE", "to copy straight between GPUs"),
    "NCCL_IB_DISABLE": _slower_nccl("NCCL_IB_DISABLE", "InfiniBand"),
}
"""Variables that bite, and what tells whether a value does."""


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Which environment variables will surprise the user."""
    checked = [check(environment[name]) for name, check in VARIABLES.items() if name in environment]
    found = [finding for finding in checked if finding]
    return found or [ok("variables", "no environment variable that is known to hurt")]


def check_threads(
    environment: Mapping[str, str], threads: int, cores: int, processes: int
) -> Finding:
    """Whether PyTorch uses the processor well.

    Args:
        environment: Of this process.
        threads: PyTorch's own number.
        cores: Those that this process may use.
        processes: How many sites share this machine.
    """
    wanted = max(1, cores // processes)
    said = f"{threads} for {_many(cores, 'core')}"
    said += f" and {processes} sites on this machine" if processes > 1 else ""
    remedy = f"export OMP_NUM_THREADS={wanted}"
    if threads > wanted:
        return warning("threads", f"{said}: they will fight for them", remedy)
    if threads < wanted:
        why = " (torchrun sets OMP_NUM_THREADS=1)" if "TORCHELASTIC_RUN_ID" in environment else ""
        return note("threads", f"{said}: some stay idle{why}", remedy)
    return ok("threads", said)


def check_open_files(most: int | None) -> Finding:
    """Whether a process may open enough sockets; None where there is no limit."""
    if most is not None and most < _LEAST_FILES:
        said = f"a process may open only {most}, sockets included"
        return warning("open files", said, "ulimit -n 1024")
    return ok("open files", "no limit" if most is None else f"up to {most:,}")


def check_disk(folder: str, free_bytes: int) -> Finding:
    """Whether there is room for temporary files."""
    said = f"{amount(free_bytes)} free in {folder}"
    if free_bytes < _LEAST_DISK_BYTES:
        return warning("disk", said, "make room, or let TMPDIR name another folder")
    return ok("disk", said)


def check_shaping(missing: str | None) -> Finding:
    """Whether `outergrad bench` can make slow links on this machine.

    Args:
        missing: What `bench` says is missing, if anything.
    """
    if missing is None:
        return ok("slow links", "`outergrad bench --link` can make them on this machine")
    return note("slow links", f"for `outergrad bench` alone: {missing}")


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
