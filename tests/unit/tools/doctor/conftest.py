"""What the tests of the doctor share."""

from __future__ import annotations

import pytest

from outergrad.tools.doctor import course, links


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Lets a measurement take a few hundredths of a second, and a site that waits in vain fail."""
    monkeypatch.setattr(links, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(links, "_ENOUGH_S", 0.02)
    monkeypatch.setattr(links, "ROUND_S", 2.0)
    monkeypatch.setattr(links, "CONNECT_S", 1.0)
    monkeypatch.setattr(course, "_VERDICT_S", 15.0)
    monkeypatch.setattr(course, "_GOODBYE_S", 1.0)
