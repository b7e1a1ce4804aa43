"""What the tests of the bench share."""

from __future__ import annotations

from datetime import timedelta

import pytest

from outergrad_lab.bench import trainer


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    """Lets a site that waits in vain fail its test."""
    monkeypatch.setattr(trainer, "PATIENCE", timedelta(seconds=20))
