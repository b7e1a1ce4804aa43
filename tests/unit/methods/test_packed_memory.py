"""Error feedback in few bits: what they lose, that the rest is owed, and how much it takes."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

import outergrad as og
from covering import covering
from low_rank import backward, batch, error, expected, model, total
from outergrad.linalg.outer import formed
from outergrad.methods.low_rank import memory as _memory
from outergrad.methods.low_rank.memory import Packed, packed, unpacked
from outergrad.wire import Int4
from ranks import run_on_lasting_groups

SHAPES = [(1, 1, 1), (1, 64, 64), (2, 5, 13), (3, 40, 50)]
WAYS: dict[str, dict[str, Any]] = {
    "gather": {"rank": 2, "reduce": "gather"},
    "all_reduce": {"rank": 2, "reduce": "all_reduce"},
    "two_way": {"rank": 2, "reduce": "two_way"},
    "alternate": {"rank": 2, "reduce": "alternate"},
    "tolerance": {"rank": 2, "tolerance": 0.5},
    "few bits": {"rank": 2, "wire": Int4(), "vectors": Int4()},
    "two_way in few bits": {"rank": 2, "reduce": "two_way", "wire": Int4(), "vectors": Int4()},
    "budget": {"budget": 9_000},
}


def kept(matrix: Tensor, turn: int) -> Tensor:
    return unpacked(packed([matrix], turn))[0]


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_come_back_within_a_step_and_right_on_average(shape, dtype):
    matrix, turns = numbers(shape, dtype), 64
    found = torch.stack([kept(matrix, turn).double() for turn in range(turns)])
    assert found.shape == (turns, *shape)
    steps = steps_of(matrix)
    assert ((found - matrix).abs() <= steps * (1 + 1e-6)).all()
    assert ((found.mean(0) - matrix).abs() <= 0.1 * steps).all()
    assert kept(matrix, 5).equal(kept(matrix.clone(), 5))


def steps_of(matrix: Tensor) -> Tensor:
    """Per number, the step of its group."""
    steps = packed([matrix], 0)[0].written[1].double()
    return steps.expand(-1, 64).flatten()[: matrix.numel()].view_as(matrix)


def test_extremes_are_not_clipped_and_nothing_stays_nothing():
    matrix = numbers((1, 8, 64))
    matrix[0, 0], matrix[0, 1, 3], matrix[0, 2, 5], matrix[0, 3] = 0.0, 1e4, -1e4, 1e-30
    for turn in range(8):
        found = kept(matrix, turn)
        assert not found[0, 0].any()
        assert torch.allclose(found[0, 1:3].amax(), torch.tensor(1e4), rtol=0.05)
        assert torch.allclose(found[0, 1:3].amin(), torch.tensor(-1e4), rtol=0.05)
        assert torch.allclose(found[0, 3], matrix[0, 3], rtol=0.05)


def test_what_is_far_below_a_step_adds_up():
    """Numbers that grow by a hundredth of a step each time, beside one that stays large."""
    generator = torch.Generator().manual_seed(1)
    growth = 3e-4 * (0.5 + torch.rand(1, 16, 64, generator=generator))
    owed, turns = torch.zeros(1, 16, 64), 400
    for turn in range(turns):
        owed[..., 0] = 1.0
        owed = kept(owed + growth, turn)
    found, due = owed[..., 1:].mean(), turns * growth[..., 1:].mean()
    assert abs(found - due) < 0.02 * due


@pytest.mark.parametrize("turn", [0, 7])
def test_matrices_in_one_piece_come_back_as_each_by_itself(turn):
    matrices = [numbers(shape) for shape in [(1, 130, 1), (1, 64, 1), (2, 5, 13), (1, 1, 1)]]
    together = packed(matrices, turn)
    for matrix, one, read in zip(matrices, together, unpacked(together), strict=True):
        assert read.equal(kept(matrix, turn))
        assert one.unpacked().equal(read)
    matrix, other = numbers((1, 8, 8)), packed([numbers((1, 4, 4))], turn)
    both = unpacked([*packed([matrix], turn), *other, *packed([matrix], turn)])
    assert [t.shape for t in both] == [matrix.shape, (1, 4, 4), matrix.shape]
    assert both[0].equal(both[2])


def test_it_is_less_than_a_tenth_of_what_adam_keeps():
    matrix = numbers((1, 256, 1024))
    nbytes = sum(t.nbytes for t in packed([matrix], 0)[0].written)
    assert nbytes == matrix.numel() * (6 + 16 / 64) / 8 < 0.1 * 2 * matrix.nbytes


@pytest.fixture
def losses(monkeypatch):
    """By slot and turn, what was to be remembered without what is: of all sites."""
    lost: dict[Any, list[Tensor]] = defaultdict(list)
    keep = _memory.Memories.update

    def recorded(self: Any, memories: Any) -> None:
        keep(self, memories)
        for slot, memory in memories.items():
            residual = self.latest(slot).residual
            assert isinstance(residual, Packed)
            lost[slot.weight].append(memory.residual.double() - residual.unpacked())

    monkeypatch.setattr(_memory.Memories, "update", recorded)
    return lost


@pytest.mark.parametrize(("settings", "sites"), covering(WAYS, [2, 3], quick=2))
def test_applied_owed_and_lost_are_all_there_was(settings, sites, losses):
    """What rounding loses is little, and known."""
    budget = {"budget": settings["budget"] * (sites - 1)} if "budget" in settings else {}
    method = og.RankDAD(error_feedback="auto", **{**settings, **budget})
    steps, original = 4, model()

    def body(rank, group):
        replica = copy.deepcopy(original)
        session = og.distribute(replica, method, group=group)
        found = [backward(replica, batch(rank, step, 40)) for step in range(steps)]
        return found, owed(session)

    results = run_on_lasting_groups(sites, body)
    means = [expected(sites, step) for step in range(steps)]
    assert losses
    for name, lost in losses.items():
        whole = total(means, name)
        applied_and_owed = (
            total(results[0][0], name) + sum(part[name] for _, part in results) / sites
        )
        missing = sum(t.reshape(whole.shape) for t in lost) / sites
        assert error(applied_and_owed + missing, whole) < 1e-5, name
        assert 0 < missing.norm() < 0.1 * whole.norm(), name


def owed(session: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for compressor, units in session._exchange.compressors.items():
        places = {m.place: m for unit in units for m in (*unit.slots, *unit.matrices)}
        for slot in places.values():
            if (residual := compressor.residual(slot)) is not None:
                shape = dict(model().named_parameters())[slot.weight].shape
                found[slot.weight] = formed(residual).double().reshape(shape)
    return found


def test_between_two_steps_all_of_it_is_in_few_bits():
    def body(rank, group):
        replica = model()
        session = og.distribute(replica, og.RankDAD(rank=2, error_feedback="auto"), group=group)
        for step in range(2):
            backward(replica, batch(rank, step, 40))
        ((compressor, _),) = session._exchange.compressors.items()
        held = compressor._memories.held().values()
        assert held
        assert all(isinstance(memory.residual, Packed) for memory in held)
        return compressor._memories.turn

    assert run_on_lasting_groups(2, body) == [2, 2]
