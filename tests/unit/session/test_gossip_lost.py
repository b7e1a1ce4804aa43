"""A site whose process is killed is left out, and the others go on with the mean that they have."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SITE = Path(__file__).with_name("gossiping_site.py")
SITES = 4


@pytest.mark.slow
def test_a_killed_site_stops_nobody(tmp_path):
    own = [
        subprocess.Popen([sys.executable, SITE, str(rank), str(SITES), tmp_path])
        for rank in range(SITES)
    ]
    codes = [process.wait(timeout=100) for process in own]
    assert codes == [0, 0, 0, -signal.SIGKILL]
    found = [torch.load(tmp_path / f"site-{rank}.pt") for rank in range(SITES - 1)]
    then, at_end = (sum(noted[k] for noted, _ in found) / len(found) for k in (0, 1))
    torch.testing.assert_close(at_end, then, rtol=0, atol=1e-14)
    for rank, (noted, _) in enumerate(found):
        torch.testing.assert_close(noted[1], then, rtol=1e-4, atol=1e-4)
        if rank != 1:  # the middle of a row of three is at the mean after one exchange
            assert (noted[0] - noted[1]).norm() > 1e-3
    took_part = [took_part for _, took_part in found]
    assert took_part == [("site 1",), ("site 0", "site 2"), ("site 1",)]
