"""Starts the relay, which adds latency for kernels that cannot delay packets by themselves."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from outergrad.launch.errors import RecipeError

SOURCE = Path(__file__).with_name("relay.c")
_REMEDY = "mend it, or leave out --latency"


def can_relay() -> bool:
    """True if this machine has what the relay needs, besides root."""
    return shutil.which("cc") is not None and os.path.exists("/dev/net/tun")


@contextmanager
def relay(namespace: str, taps: Sequence[str], delay_s: float) -> Iterator[None]:
    """Adds TAP devices to a network namespace and copies Ethernet frames between them.

    Args:
        namespace: Name of the namespace.
        taps: Names of the devices, which vanish on leaving.
        delay_s: Delay of each frame, in seconds.

    Raises:
        RecipeError: The relay cannot be compiled or started, or ended before its time.
    """
    # The folder goes once the relay runs: nothing stays on the disk if this process is killed.
    with TemporaryDirectory(prefix="outergrad-") as folder:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, _compile(folder), f"{delay_s * 1e9:.0f}", *taps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the relay
        )
        assert process.stdout is not None
        said = process.stdout.readline()
    with process:
        if said != "ready\n":
            raise RecipeError(f"--latency: the relay does not start ({said.strip()}): {_REMEDY}")
        yield
        if process.poll() is not None:
            why = " ".join(process.stdout.read().split()) or f"code {process.returncode}"
            raise RecipeError(f"--latency: the relay ended too early ({why}): try again")


def _compile(folder: str) -> str:
    program = os.path.join(folder, "relay")
    done = subprocess.run(["cc", "-O2", "-o", program, str(SOURCE)], capture_output=True, text=True)
    if done.returncode != 0:
        why = next(iter(done.stderr.splitlines()), f"code {done.returncode}")
        raise RecipeError(f"--latency: cannot compile the relay ({why}): {_REMEDY}")
    return program
