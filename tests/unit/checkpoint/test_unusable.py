"""Nothing to go on from, and something that cannot be used, are two things."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from trainings import DAMAGES, METHOD, cut, dead_link, refused, restored, saved_after

from outergrad.checkpoint import folder as files
from outergrad.checkpoint.folder import saves_in
from ranks import try_ranks
from sites_that_save import Site, writing_that_dies


def steps_in(folder: Path) -> list[int]:
    return [save.step for save in sorted(saves_in(folder))]


@pytest.mark.parametrize("name", ["site-1.pt", "shared-0.pt"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_where_nothing_can_be_read_all_sites_say_why_and_nothing_goes(damage, name, tmp_path):
    saved_after([2, 4], lambda rank: tmp_path)
    paths = [tmp_path / str(save) / name for save in saves_in(tmp_path)]
    for path in paths:
        damage(path)
    for message in refused(lambda rank: tmp_path):
        assert f"the folder {tmp_path} cannot be gone on from" in message
        assert all(f"{path} cannot be read: " in message for path in paths)
        assert "move the folder away to begin anew" in message


def test_nor_where_every_site_has_a_folder_and_one_is_damaged(tmp_path):
    saved_after([2, 4], lambda rank: tmp_path / str(rank))
    for save in saves_in(tmp_path / "1"):
        cut(tmp_path / "1" / str(save) / "site-1.pt")
    for rank, message in enumerate(refused(lambda rank: tmp_path / str(rank))):
        assert f"the folder {tmp_path / str(rank)} cannot" in message
        assert message.count("site 1: ") == 2


def test_a_whole_checkpoint_that_is_a_dead_link_is_told_of(tmp_path):
    saved_after([2], lambda rank: tmp_path)
    (save,) = saves_in(tmp_path)
    dead_link(tmp_path / str(save))
    for message in refused(lambda rank: tmp_path):
        assert f"{tmp_path / str(save)} cannot be looked into: No such file" in message


def test_a_file_of_something_else_is_named(tmp_path):
    saved_after([2], lambda rank: tmp_path / str(rank))
    (save,) = saves_in(tmp_path / "1")
    path = tmp_path / "1" / str(save) / "site-1.pt"
    for other in ({"weight": torch.ones(2)}, {"shared": "../x", "state": {}}):
        torch.save(other, path)
        for message in refused(lambda rank: tmp_path / str(rank)):
            assert f"{path} is no part of a checkpoint" in message


def test_content_that_nobody_can_go_on_from_stops_all_sites(tmp_path):
    saved_after([2], lambda rank: tmp_path / str(rank))
    (save,) = saves_in(tmp_path / "1")
    path = tmp_path / "1" / str(save) / "site-1.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "state": {**state["state"], "parts": 7, "own": []}}, path)
    for message in refused(lambda rank: tmp_path / str(rank)):
        assert f"{save} does not fit: argument of type 'int'" in message


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_disk_is_no_first_start(lost, tmp_path, caplog):
    saved_after([2, 4], lambda rank: tmp_path / str(rank))
    shutil.rmtree(tmp_path / str(lost))
    for message in refused(lambda rank: tmp_path / str(rank)):
        assert f"has site-{1 - lost}.pt of 2 files" in message
        assert "let restore(allow_lost=True) go on with what there is" in message
    for found in restored(lambda rank: tmp_path / str(rank), allow_lost=True):
        assert (found.step, found.lost, found.new) == (4, 1, (lost,))
    assert f"site {lost}: new" in caplog.text


def test_an_old_copy_of_a_disk_needs_both(tmp_path):
    saved_after([2], lambda rank: tmp_path / str(rank))
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    saved_after([4, 6, 8], lambda rank: tmp_path / str(rank), restore=True)
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "copy").rename(tmp_path / "1")
    for message in refused(lambda rank: tmp_path / str(rank)):
        assert "let restore(allow_lost=True, allow_foreign=True) go on" in message
    both = {"allow_lost": True, "allow_foreign": True}
    assert [f.step for f in restored(lambda rank: tmp_path / str(rank), **both)] == [8, 8]


def test_arguments_that_differ_are_told(tmp_path):
    def body(rank, group):
        Site(METHOD, rank, group, tmp_path).checkpoints.restore(allow_lost=rank == 1)

    for error in try_ranks(2, body):
        assert "site 1 has 'allowed: allow_lost=True' where site 0 has 'allowed: '" in str(error)


@pytest.mark.parametrize("place", ["", "{rank}"])
def test_a_first_checkpoint_that_was_cut_short_is_a_first_start(place, tmp_path, caplog):
    where = lambda rank: tmp_path / place.format(rank=rank)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", writing_that_dies(2, {"rank 0": "after", "rank 1": "before"}))
        try_ranks(2, lambda rank, group: Site(METHOD, rank, group, where(rank)).run(2, every=2))
    assert restored(where) == [None, None]
    assert "was never finished: it has site-0.pt of 2 files" in caplog.text
    assert restored(where, allow_lost=True) == [None, None]


def test_one_that_was_cut_short_goes_when_a_later_one_is_whole(tmp_path):
    saved_after([2], lambda rank: tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", writing_that_dies(4, {"rank 0": "after", "rank 1": "within"}))
        try_ranks(2, lambda rank, group: Site(METHOD, rank, group, tmp_path).run(4, every=2))
    assert steps_in(tmp_path) == [2, 4]
    saved_after([3], lambda rank: tmp_path, restore=True)
    assert steps_in(tmp_path) == [2, 3, 4]
    saved_after([4], lambda rank: tmp_path, restore=True)
    assert steps_in(tmp_path) == [3, 4]
    assert not [*tmp_path.rglob(".site*")]


def test_what_was_passed_over_stays_while_others_come_and_go(tmp_path):
    saved_after([2, 4], lambda rank: tmp_path)
    damaged = tmp_path / str(max(saves_in(tmp_path)))
    cut(damaged / "site-0.pt")
    before = sorted(damaged.iterdir())
    saved_after([3, 4, 5, 6], lambda rank: tmp_path, restore=True)
    assert steps_in(tmp_path) == [4, 5, 6]
    assert sorted(damaged.iterdir()) == before


def test_an_older_one_is_read_before_it_goes(tmp_path, caplog):
    saved_after([2, 4], lambda rank: tmp_path)
    saved_after([6], lambda rank: tmp_path, restore=True)
    assert steps_in(tmp_path) == [4, 6]
    older = tmp_path / str(min(saves_in(tmp_path)))
    cut(older / "shared-0.pt")
    saved_after([8, 10], lambda rank: tmp_path, restore=True)
    assert steps_in(tmp_path) == [4, 8, 10]
    assert f"left where it is: {older / 'shared-0.pt'} cannot be read" in caplog.text


def test_a_run_that_read_nothing_removes_only_its_own(tmp_path):
    saved_after([2, 4], lambda rank: tmp_path)
    saved_after([1, 3, 5], lambda rank: tmp_path)
    assert steps_in(tmp_path) == [2, 3, 4, 5]


def test_one_that_was_gone_on_from_without_a_site_stays(tmp_path):
    saved_after([2], lambda rank: tmp_path)
    (save,) = saves_in(tmp_path)
    (tmp_path / str(save) / "site-1.pt").unlink()

    def body(rank, group):
        site = Site(METHOD, rank, group, tmp_path)
        assert site.checkpoints.restore(allow_lost=True).lost == 1
        for step in (3, 4, 5):
            site.checkpoints.save(step)

    assert try_ranks(2, body) == [None, None]
    assert steps_in(tmp_path) == [2, 4, 5]
