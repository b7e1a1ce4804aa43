"""Files that are damaged, parts that do not fit, sites that differ: all sites hear of it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from trainings import DAMAGES, METHOD, restored, saved_after

import outergrad as og
from outergrad.checkpoint import folder as files
from outergrad.checkpoint.folder import digests, saves_in, tensors, whole, without
from outergrad.checkpoint.messaging import packed, unpacked
from outergrad.checkpoint.parts import random_state, set_random_state
from ranks import run_on_lasting_groups, run_ranks, try_ranks
from sites_that_save import Site


@pytest.mark.parametrize("name", ["site-1.pt", "shared-0.pt"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_taken(damage, name, tmp_path, caplog):
    saved_after([2, 4], lambda rank: tmp_path)
    latest = max(saves_in(tmp_path))
    damage(tmp_path / str(latest) / name)
    for found in restored(lambda rank: tmp_path):
        assert found.step == 2
        assert found.exact
        assert any(name in line and "cannot be read" in line for line in found.skipped)
    assert str(tmp_path / str(latest) / name) in caplog.text


def test_only_the_last_ones_are_kept_and_written_once_where_folders_are_shared(tmp_path):
    saved_after([1, 2, 3, 4], lambda rank: tmp_path)
    assert [save.step for save in sorted(saves_in(tmp_path))] == [3, 4]
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("step-00000004*/*")}
    assert set(sizes) == {"site-0.pt", "site-1.pt", "shared-0.pt"}
    shared = torch.load(next(tmp_path.glob("step-00000004*/shared-0.pt")), weights_only=True)
    assert any("'model'/'0.weight'" in place for place in shared)
    assert not any("running_mean" in place for place in shared), "each site has its own"


def test_a_file_goes_to_the_site_that_saved_it(tmp_path):
    """Machines may come back in another order: each folder then holds another site's file."""
    saved_after([3], lambda rank: tmp_path / str(rank))
    assert [found.exact for found in restored(lambda rank: tmp_path / str(1 - rank))] == [True] * 2


def test_a_site_that_cannot_write_stops_all_and_what_was_there_stays(tmp_path, monkeypatch):
    write = files.write

    def full(path: Path, value) -> None:
        if path.parents[1].name == "1" and path.parent.name.startswith("step-00000002"):
            raise OSError(28, "No space left on device", str(path))
        write(path, value)

    monkeypatch.setattr(files, "write", full)
    first, second = try_ranks(2, lambda rank, group: _saved_twice(rank, group, tmp_path))
    assert isinstance(first, ValueError)
    assert "site 1 could not take part" in str(first)
    assert "No space left" in str(first)
    assert isinstance(second, OSError)
    monkeypatch.undo()
    assert [found.step for found in restored(lambda rank: tmp_path / str(rank))] == [1, 1]


def _saved_twice(rank, group, folder):
    site = Site(METHOD, rank, group, folder / str(rank))
    for step in range(2):
        site.step(step)
        site.checkpoints.save(step + 1)


def made(rank, group, folder, **options):
    model = nn.Linear(4, 3)
    session = og.distribute(model, group=group)
    return og.Checkpoints(folder, session, model=model, **options)


def refused(tmp_path, options_of, does=lambda checkpoints, rank: None) -> list[str]:
    """What each site says."""

    def body(rank, group):
        with pytest.raises((ValueError, TypeError)) as error:
            does(made(rank, group, tmp_path, **options_of(rank)), rank)
        return str(error.value)

    return run_ranks(2, body)


def test_sites_that_differ_are_told_how(tmp_path):
    scaler = torch.amp.GradScaler(enabled=False)
    for message in refused(tmp_path, lambda rank: {"scaler": scaler} if rank else {}):
        assert "site 1 has 'parts: model, scaler' where site 0 has 'parts: model'" in message
    for message in refused(tmp_path, lambda rank: {"site": 3}):
        assert "the numbers of the sites are [3, 3]" in message
    for message in refused(tmp_path, lambda rank: {"keep": 0}):
        assert "keep=0" in message
    one, other = refused(tmp_path, lambda rank: {"keep": rank})
    assert "keep=0" in one
    assert "site 0 could not take part" in other
    for message in refused(tmp_path, lambda rank: {"sampler": 7}):
        assert "sampler=7 cannot be saved" in message
    steps = lambda checkpoints, rank: checkpoints.save(5 + rank)  # noqa: E731
    for message in refused(tmp_path, lambda rank: {}, steps):
        assert "site 1 has 'step: 6' where site 0 has 'step: 5'" in message


class Odd:
    """Its state is no plain data."""

    def state_dict(self):
        return {"path": Path()}

    def load_state_dict(self, state):
        raise AssertionError


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    for message in refused(tmp_path, lambda rank: {"odd": Odd()}, lambda c, rank: c.save(1)):
        assert "it holds pathlib.PosixPath, which is none of tensors, numbers" in message
        assert "weights_only" not in message


def test_other_parts_than_were_saved_are_refused(tmp_path):
    run_on_lasting_groups(2, lambda rank, group: made(rank, group, tmp_path).save(3))
    generator = torch.Generator()
    for message in refused(
        tmp_path, lambda rank: {"dropout": generator}, lambda c, rank: c.restore()
    ):
        assert "holds model, but no 'dropout'" in message


def test_random_streams_go_on():
    def draws():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.gauss(0, 1)

    draws()
    state = unpacked(packed(random_state()))
    expected = draws(), draws()
    set_random_state(state)
    assert (draws(), draws()) == expected


def test_a_tree_without_some_tensors_is_whole_again():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(torch.bfloat16)
    tree = {"model": model.state_dict(), "more": [(torch.ones(2), 7, None), {3: torch.ones(2)}]}
    places = dict(tensors(tree))
    assert set(digests(tree).values()) == set(places)
    some = {place for place in places if "weight" in place or "more" in place}
    found = whole(unpacked(packed(without(tree, some))), {place: places[place] for place in some})
    assert found["model"]._metadata == tree["model"]._metadata
    assert dict(tensors(found)).keys() == places.keys()
    assert all(t.equal(places[place]) for place, t in tensors(found))
    assert found["more"][0][1:] == (7, None)
