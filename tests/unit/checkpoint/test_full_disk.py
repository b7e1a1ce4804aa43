"""Where a site cannot write, all sites hear why, nothing half written stays, and none hangs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from trainings import METHOD, restored, saved_after

import outergrad as og
from full_disk import longest_file, read_only, small_disk
from outergrad.checkpoint.folder import saves_in
from ranks import try_ranks
from sites_that_save import Site


class Large:
    """A part that is larger on site 1, once it is full."""

    def __init__(self, rank: int):
        self.rank, self.full = rank, False

    def state_dict(self):
        return {"filler": torch.randn(400_000 if self.full and self.rank else 1)}

    def load_state_dict(self, state):
        self.rank = self.rank


def saving(folder_of) -> tuple[list, list]:
    """Of every site, what came of a save for which there is no room, and of one afterwards."""
    found: list = [None, None]

    def body(rank, group):
        model = nn.Linear(4, 3)
        session = og.distribute(model, group=group)
        part = Large(rank)
        checkpoints = og.Checkpoints(folder_of(rank), session, model=model, part=part)
        checkpoints.save(1)
        part.full = True
        with pytest.raises((ValueError, OSError)) as error:
            checkpoints.save(2)
        part.full = False
        torch.distributed.barrier(group)
        found[rank] = error.value, saves_of(folder_of(rank)), left_in(folder_of(rank))
        checkpoints.save(3)
        return checkpoints.restore()

    return try_ranks(2, body), found


def saves_of(folder: Path) -> list[int]:
    return [save.step for save in sorted(saves_in(folder))]


def left_in(folder: Path) -> list[str]:
    """What there is but whole files of checkpoints."""
    return [p.name for p in folder.rglob("*") if p.name.startswith(".") or p.name == "unfinished"]


@pytest.mark.parametrize("place", ["", "{rank}"], ids=["shared", "apart"])
def test_a_file_that_does_not_fit_is_told_to_all(place, tmp_path):
    where = lambda rank: tmp_path / place.format(rank=rank)  # noqa: E731
    with longest_file(200_000):
        results, found = saving(where)
    told(results, found, "File too large")


def test_a_full_disk_is_told_to_all(tmp_path):
    with small_disk(tmp_path / "1", size="256k"):
        results, found = saving(lambda rank: tmp_path / str(rank))
        told(results, found, "No space left on device")


def told(results, found, reason: str) -> None:
    (other, *before_0), (own, *before_1) = found
    assert isinstance(own, OSError)
    assert reason in str(own)
    assert "site-1.pt" in str(own)
    assert type(other) is ValueError
    assert "site 1 could not take part" in str(other)
    assert reason in str(other)
    assert before_0 == before_1 == [[1], []]
    assert [one.step for one in results] == [3, 3]


def test_a_disk_that_became_read_only_is_told_to_all(tmp_path):
    def body(rank, group):
        site = Site(METHOD, rank, group, tmp_path / str(rank))
        site.checkpoints.save(1)
        torch.distributed.barrier(group)
        if rank == 1:
            with read_only(tmp_path / "1"), pytest.raises(OSError, match="Read-only"):
                site.checkpoints.save(2)
        else:
            with pytest.raises(ValueError, match=r"site 1 could not take part: .*Read-only"):
                site.checkpoints.save(2)
        return saves_of(tmp_path / str(rank))

    with small_disk(tmp_path / "1", size="4m"):
        assert try_ranks(2, body) == [[1], [1]]


@pytest.mark.parametrize("name", ["file", "file/below", "dead link"])
def test_a_folder_that_cannot_be_one_is_told_to_all(name, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dead link").symlink_to(tmp_path / "nowhere" / "at" / "all")

    def body(rank, group):
        Site(METHOD, rank, group, tmp_path / name if rank else tmp_path / "fine")

    other, own = try_ranks(2, body)
    assert isinstance(own, OSError), own
    assert type(other) is ValueError
    assert "site 1 could not take part" in str(other)
    assert [*(tmp_path / "fine").iterdir()] == []


def test_a_folder_that_vanishes_is_made_again(tmp_path):
    def body(rank, group):
        site = Site(METHOD, rank, group, tmp_path / str(rank))
        site.checkpoints.save(1)
        shutil.rmtree(tmp_path / str(rank))
        site.checkpoints.save(2)
        site.checkpoints.save(3)
        site.checkpoints.save(4)

    assert try_ranks(2, body) == [None, None]
    assert saves_of(tmp_path / "0") == saves_of(tmp_path / "1") == [3, 4]


def test_a_folder_that_becomes_a_file_is_told_to_all(tmp_path):
    def body(rank, group):
        site = Site(METHOD, rank, group, tmp_path / str(rank))
        if rank == 1:
            (tmp_path / "1").rmdir()
            (tmp_path / "1").touch()
        for does in (lambda: site.checkpoints.save(1), site.checkpoints.restore):
            with pytest.raises(OSError if rank else ValueError, match=r"directory|exists"):
                does()
        return saves_of(tmp_path / "0")

    assert try_ranks(2, body) == [[], []]


class Unwritable:
    """Pickle does not take its state, on one site."""

    def __init__(self, rank: int):
        self.rank = rank

    def state_dict(self):
        return {"hook": (lambda: 0) if self.rank else 0}

    def load_state_dict(self, state):
        raise AssertionError


def test_what_cannot_be_written_at_all_is_told_to_all(tmp_path):
    def body(rank, group):
        model = nn.Linear(4, 3)
        og.Checkpoints(tmp_path, group=group, model=model, part=Unwritable(rank)).save(1)

    other, own = try_ranks(2, body)
    assert "lambda" in str(own)
    assert "site 1 could not take part" in str(other)
    assert "lambda" in str(other)
    assert not [*tmp_path.iterdir()]


def test_steps_and_numbers_that_are_none_are_told_to_all(tmp_path):
    for step in (-1, 2.5, "4"):
        errors = try_ranks(2, lambda r, g, s=step: Site(METHOD, r, g, tmp_path).checkpoints.save(s))
        assert all(isinstance(error, ValueError | TypeError) for error in errors), errors
    model = nn.Linear(4, 3)
    make = lambda r, g: og.Checkpoints(tmp_path, group=g, model=model, site=[0, 1.5][r])  # noqa: E731
    other, own = try_ranks(2, make)
    assert isinstance(own, TypeError)
    assert "site 1 could not take part" in str(other)
    assert not [*tmp_path.iterdir()]


def test_a_training_on_a_disk_that_fills_up_goes_on_from_the_last_one(tmp_path):
    """Space for two checkpoints, not for three: one is removed only when the next is there."""
    saved_after([1], lambda rank: tmp_path / "one")
    each = sum(-(-path.stat().st_size // 4096) * 4096 for path in tmp_path.glob("one/*/*.pt"))
    with small_disk(tmp_path / "disk", size=str(5 * each // 2)) as disk:
        with pytest.raises((OSError, ValueError), match="No space"):
            saved_after(range(1, 4), lambda rank: disk)
        assert saves_of(disk) == [1, 2]
        assert left_in(disk) == []
        assert [found.step for found in restored(lambda rank: disk)] == [2, 2]
