"""What the tests of the bench share."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from outergrad_lab.bench import meeting


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    """Lets a site that waits in vain fail its test."""
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=20))


@pytest.fixture
def data_dir() -> Path:
    """The folder of the real data sets."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("OUTERGRAD_DATA", beside))
    if not (folder / "mnist").is_dir():
        pytest.skip(f"no mnist in {folder}: set OUTERGRAD_DATA")
    return folder
