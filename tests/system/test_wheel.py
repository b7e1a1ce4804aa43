"""What is installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile

from places import REPOSITORY


def test_the_wheel_has_the_experiments_and_not_their_results(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    yaml = {path.name for path in (REPOSITORY / "experiments").glob("*.yaml")}
    prefix = "outergrad_lab/experiments/experiments/"
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == yaml
    assert {"outergrad/__init__.py", "outergrad/py.typed", "outergrad/report/page.html"} <= {*names}
    assert wheel.stat().st_size < 2e6
