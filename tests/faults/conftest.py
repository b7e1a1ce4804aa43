"""Fixtures of the tests of faults."""

from __future__ import annotations

import pytest
from faulty import FaultyComm


@pytest.fixture
def faulty(faulty_transport, monkeypatch):
    """The same, and sites vote on every step: what is faulty is a vote, or is found by one."""
    monkeypatch.setattr("outergrad.commit.machine.EVERY", 1)
    return faulty_transport


@pytest.fixture
def faulty_transport(monkeypatch):
    """`distribute` uses this class of a faulty transport, which no other test has."""

    class Comm(FaultyComm):
        pass

    monkeypatch.setattr("outergrad.comm.process_group.TorchComm", Comm)
    return Comm
