"""Fixtures of the tests of faults."""

from __future__ import annotations

import pytest
from faulty import FaultyComm


@pytest.fixture
def faulty(monkeypatch):
    """`distribute` uses this class of a faulty transport, which no other test has."""

    class Comm(FaultyComm):
        pass

    monkeypatch.setattr("outergrad.comm.process_group.TorchComm", Comm)
    return Comm
