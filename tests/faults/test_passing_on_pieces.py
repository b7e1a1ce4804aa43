"""A site that changes or does not pass on a piece of another site's merged triplets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from faulty import Died, FaultyComm

import outergrad as og
from cases import mlp
from outergrad.comm.work import RELAY_LANE
from ranks import run_on_lasting_groups, try_ranks

SITES, STEPS, FAULTY = 3, 4, 2
TWO_WAY = og.RankDAD(rank=2, reduce="two_way")
torch.manual_seed(4)
MODEL = mlp(6, 24, 4)


class PassingOn(FaultyComm):
    """Calls `fault` with the pieces that site 2 is about to pass on, in the step that is given."""

    step: int | None = None
    seen = 0

    def fault(self, pieces: torch.Tensor) -> torch.Tensor:
        return pieces

    def _exchanged(self, outgoing: Any, sizes: Any, device: Any, lane: int = 0, *more: Any) -> Any:
        if lane == RELAY_LANE:
            self.seen += 1
            if self.rank == FAULTY and self.seen - 1 == self.step:
                outgoing = [self.fault(outgoing[0])] * len(outgoing)
        return super()._exchanged(outgoing, sizes, device, lane, *more)


class Flipping(PassingOn):
    """Changes a bit of the first owner's message."""

    step = 1

    def fault(self, pieces):
        changed = pieces.clone()
        changed[1] ^= 4
        return changed


class Dying(PassingOn):
    """Is gone before it passes anything on."""

    step = 2

    def fault(self, pieces):
        self._die(pieces)
        return pieces


@pytest.fixture
def with_comm(monkeypatch):
    monkeypatch.setattr("outergrad.planning.packing.relays", lambda *_: True)

    def use(comm):
        monkeypatch.setattr("outergrad.comm.process_group.TorchComm", comm)

    return use


def trained(method: Any, rank: int, group: Any) -> list[list[torch.Tensor | None]]:
    """The gradients of all steps; None where one was discarded."""
    model, found = copy.deepcopy(MODEL), []
    session = og.distribute(model, method, group=group, timeout=10.0)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad()
        try:
            model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        except og.StepDiscardedError as error:
            found.append(str(error))
            continue
        found.append([p.grad.clone() for p in model.parameters()])
    session.detach()
    return found


def test_a_message_that_was_changed_on_its_way_is_sent_again_by_its_owner(with_comm):
    results = {}
    for comm in (PassingOn, Flipping):
        with_comm(comm)
        results[comm] = run_on_lasting_groups(SITES, lambda rank, g: trained(TWO_WAY, rank, g))
    for sound, healed in zip(results[PassingOn], results[Flipping], strict=True):
        for own, other in zip(sound, healed, strict=True):
            assert all(map(torch.equal, own, other))


def test_where_it_cannot_be_sent_again_the_step_is_discarded(with_comm):
    """Its sketches go into sums, so that all have to vote on it."""
    with_comm(Flipping)
    method = og.PerLayer({"0.*": og.PowerSGD(rank=1), "*": TWO_WAY})
    first, *others = run_on_lasting_groups(SITES, lambda rank, g: trained(method, rank, g))
    assert "refused a message of site 0" in first[Flipping.step]
    for other in others:
        assert other[Flipping.step] == first[Flipping.step]
        for step in set(range(STEPS)) - {Flipping.step}:
            assert all(map(torch.equal, other[step], first[step]))


def test_a_site_that_is_lost_before_it_passes_anything_on_is_named(with_comm):
    """No site goes on with what it has: the step is the same for all."""
    with_comm(Dying)
    *others, died = try_ranks(SITES, lambda rank, group: trained(TWO_WAY, rank, group))
    assert isinstance(died, Died)
    for error in others:
        assert isinstance(error, og.SiteLostError)
        assert error.sites == (FAULTY,)
        assert error.step == Dying.step
        assert error.may_differ in ((), (FAULTY,))
