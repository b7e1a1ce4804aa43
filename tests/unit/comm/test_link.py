"""The link is measured as it is, and all sites go by the same figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from outergrad.comm import link
from outergrad.comm.torch import Ready, TorchComm
from ranks import run_on_lasting_groups


class SimulatedComm:
    """A link of known delay and rate, on a clock of its own."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, sites: int, delay_s: float, bytes_per_s: float) -> None:
        self.world_size, self._delay_s, self._bytes_per_s = sites, delay_s, bytes_per_s
        self.now_s = 0.0

    def all_gather(self, t, sizes, lane=0):
        sent_bytes = t.nbytes * (self.world_size - 1)
        self.now_s += self._delay_s + sent_bytes / self._bytes_per_s
        return Ready([t] * self.world_size)

    def control(self, values):
        return torch.tensor(values)

    def all_began(self):
        """Nobody goes by the pace here."""


@pytest.mark.parametrize("sites", [3, 8])
@pytest.mark.parametrize(("delay_s", "bytes_per_s"), [(0.02, 1.25e6), (1e-4, 1.25e8)])
def test_delay_and_rate_are_found(sites, delay_s, bytes_per_s, monkeypatch):
    comm = SimulatedComm(sites, delay_s, bytes_per_s)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: comm.now_s))
    found = link.measured_link(comm)
    assert found.delay_s == pytest.approx(delay_s, rel=0.01)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert comm.now_s < 1 + 20 * delay_s


def test_a_slow_link_is_not_kept_busy_for_minutes(monkeypatch):
    comm = SimulatedComm(2, 0.02, 8e3)
    monkeypatch.setattr(link, "time", SimpleNamespace(perf_counter=lambda: comm.now_s))
    assert link.measured_link(comm).bytes_per_s == pytest.approx(8e3, rel=0.01)
    assert comm.now_s < 10.0


def test_all_sites_agree():
    def body(rank, group):
        return link.measured_link(TorchComm(group, torch.device("cpu")))

    first, *others = run_on_lasting_groups(3, body)
    assert first.delay_s > 0
    assert first.bytes_per_s > 0
    assert all(other == first for other in others)
