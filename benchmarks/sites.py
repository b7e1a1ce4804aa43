"""One process per site: starting them, joining them in a group, collecting what they say.

The script of a benchmark runs itself again once per site; ``is_site()`` tells the two roles
apart. A site prints its result as one line of JSON, its last on standard output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from links import Place

_PARENT = "OUTERGRAD_BENCH_PARENT"


def is_site() -> bool:
    """Whether this process is one of the sites that ``run`` started."""
    return _PARENT in os.environ


def run(arguments: list[str], places: list[Place], threads: int) -> list[Any]:
    """Runs a script at every place and returns what each site printed, in rank order.

    Args:
        arguments: The script and its arguments.
        places: Where the sites run.
        threads: Threads that PyTorch may use on each site.

    Raises:
        RuntimeError: A site failed; the others are ended.
    """
    port = _free_port()
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in places]
        processes = []
        for rank, (place, output) in enumerate(zip(places, outputs, strict=True)):
            environment = _environment(rank, places, port, threads)
            command = [*place.prefix, sys.executable, *arguments]
            # A session of its own: Ctrl-C reaches this process alone, which ends the sites.
            process = subprocess.Popen(
                command, env=environment, stdout=output, start_new_session=True
            )
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes)
        return [_last_line(output) for output in outputs]


@contextlib.contextmanager
def group(timeout_s: float) -> Iterator[tuple[int, int]]:
    """Joins the process group of all sites and yields this site's rank and their number."""
    import torch  # not at the top: the process that starts the sites does without it
    import torch.distributed as dist

    die_with_parent()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.barrier()  # no site may leave while another still waits for its bytes
    finally:
        dist.destroy_process_group()


def die_with_parent() -> None:
    """Has the kernel end this process when the one that started it ends, however it does."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        sys.exit("The benchmark that started this site has ended.")


def progress(text: str) -> None:
    """Shows a line on standard error, in place of the one before if it is a terminal.

    An empty text removes the line.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _environment(rank: int, places: list[Place], port: int, threads: int) -> dict[str, str]:
    return os.environ | {
        _PARENT: str(os.getpid()),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": places[rank].interface,
        "OMP_NUM_THREADS": str(threads),
        # Else it warns that the addresses of a namespace have no host names.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all to succeed or the first to fail."""
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    failed = {rank: code for rank, code in enumerate(codes) if code}
    if failed:
        raise RuntimeError(f"Sites failed (rank: exit status): {failed}; see their errors above.")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _last_line(output: Any) -> Any:
    output.seek(0)
    return json.loads(output.read().splitlines()[-1])
