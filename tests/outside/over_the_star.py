"""PyTorch's own tests of torch.distributed, over gloo and through a hub: who passes what.

python tests/outside/over_the_star.py               # all, by three sites: ten minutes
python tests/outside/over_the_star.py test_all_reduce_sum test_gather
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from select import select

from torch_tests_on_cpus import all_tests

from stars import NAMES, hub, kit_of

HERE = Path(__file__).resolve().parent
SITES, LIMIT_S = 3, 45.0
BACKENDS = ("gloo", "star")


class Ranks:
    """Processes that run tests together, one after the other, and begin anew where one hangs."""

    def __init__(self, backend: str, port: int) -> None:
        self._backend, self._port = backend, port
        self._ranks: list[subprocess.Popen[str]] = []

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="outergrad-"))
        for name in ("barrier", "test_dir", "init_dir"):
            (folder / name).mkdir()
        script = str(HERE / "torch_tests_on_cpus.py")
        self._ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(SITES), str(folder), *self._about(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(SITES)
        ]

    def _about(self, rank: int) -> list[str]:
        star = [str(kit_of(NAMES[rank])), f"127.0.0.1:{self._port}"]
        return star if self._backend == "star" else []

    def run(self, test: str) -> str | None:
        """Runs a test; returns what went wrong, in a line, or None."""
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"test": test, "method": "ddp"}) + "\n")
            rank.stdin.flush()
        until = time.monotonic() + LIMIT_S
        answers = [self._answer(rank, until) for rank in self._ranks]
        if not all(answers):
            self.end()
            return "a process ended, or none does"
        errors = [error for answer in answers if (error := json.loads(answer)["error"])]
        return errors[0].strip().splitlines()[-1] if errors else None

    def _answer(self, rank: subprocess.Popen[str], until: float) -> str:
        assert rank.stdout is not None
        ready, _, _ = select([rank.stdout], [], [], max(0.1, until - time.monotonic()))
        return rank.stdout.readline() if ready else ""

    def end(self) -> None:
        """Ends all processes."""
        for rank in self._ranks:
            with rank:
                rank.kill()
        self._ranks = []


def results(tests: Iterable[str]) -> dict[str, dict[str, str | None]]:
    """What went wrong in each test, by backend."""
    found: dict[str, dict[str, str | None]] = {}
    with hub(SITES) as server:
        for backend in BACKENDS:
            ranks = Ranks(backend, server.port)
            found[backend] = {test: ranks.run(test) for test in tests}
            ranks.end()
    return found


def main() -> None:
    """Prints how many pass, and those that pass over one alone."""
    found = results(sys.argv[1:] or list(dict.fromkeys(all_tests())))
    passed = {backend: {t for t, e in of.items() if e is None} for backend, of in found.items()}
    for backend in BACKENDS:
        print(f"{backend}: {len(passed[backend])} of {len(found[backend])} pass")
    for backend, other in (BACKENDS, BACKENDS[::-1]):
        for test in sorted(passed[backend] - passed[other]):
            print(f"{backend} alone: {test}: {found[other][test]}")


if __name__ == "__main__":
    main()
