"""Sites as processes that die, hang, lie or are cut off: see harness.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from covering import LONG

HARNESS = Path(__file__).with_name("harness.py")
INJECTIONS = 1000 if LONG else 40
LIMIT_S = 5.0 * INJECTIONS


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_sites_that_are_left_are_equal_after_every_fault():
    """And raised in time, named the site that is lost, and ended by themselves."""
    seed = os.environ.get("OUTERGRAD_FAULT_SEED", "0")
    options = ["--injections", str(INJECTIONS), "--seed", seed, "--timeout", "1.5"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(HARNESS), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
    assert f"{INJECTIONS} faults in" in done.stdout, done.stdout
    print(done.stdout)
