"""What another site says never leads out of the folder, nor past what this site knows itself."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from trainings import METHOD, content, refused, restored, saved_after

from outergrad.checkpoint import checkpoints, resume, writer
from outergrad.checkpoint.claims import understood
from outergrad.checkpoint.folder import Save, saves_in
from outergrad.checkpoint.messaging import gathered, packed, swapped
from outergrad.core.sites import sites_of
from ranks import try_ranks
from sites_that_save import Site

ELSEWHERE = ["../../out", "/etc/passwd", "", "3F9A2C", "3f9a2", "3f9a2c/", "3f9a2c\n", None, 7, []]
LIAR = 1


def lying(tell):
    """A `gathered` in which one site tells something else than it has to tell."""

    def gather(comm, value):
        return gathered(comm, tell(value) if comm.rank == LIAR else value)

    return gather


def errors_of(place, tell, monkeypatch, does) -> list[str]:
    with monkeypatch.context() as patch:
        patch.setattr(place, "gathered", lying(tell))
        errors = try_ranks(2, does)
    assert all(isinstance(error, ValueError) for error in errors), errors
    return [str(error) for error in errors]


@given(st.text() | st.sampled_from(ELSEWHERE))
@example("../../x")
def test_a_checkpoint_names_a_folder_in_its_folder(token):
    try:
        name = str(Save(4, 2, token))
    except (TypeError, ValueError):
        return
    assert name == f"step-00000004-of-2-{token}"
    assert len(token) == 6
    assert set(token) <= set("0123456789abcdef")


@pytest.mark.parametrize(("step", "sites"), [(-1, 2), (1, 0), (1, -2), (10**18, 2), (1, 10**6)])
def test_its_numbers_are_such_as_are_read_again(step, sites):
    with pytest.raises(ValueError, match="no name of a checkpoint"):
        Save(step, sites, "3f9a2c")


def test_other_folders_are_no_checkpoints(tmp_path):
    names = ["step-4-of-2-3f9a2c", "step-000000004-of-2-3f9a2c", "step-00000004-of-2-3f9a2c.old"]
    names += ["step-00000004-of-02-3f9a2c", "step-00000004-of-2-3F9A2C"]
    names += ["step-0000000\N{ARABIC-INDIC DIGIT FOUR}-of-2-3f9a2c"]
    for name in [*names, "step-00000004-of-2-3f9a2c"]:
        (tmp_path / name).mkdir()
    assert [*saves_in(tmp_path)] == [Save(4, 2, "3f9a2c")]


@pytest.mark.parametrize("token", ELSEWHERE)
def test_an_id_that_leads_elsewhere_is_refused_on_all_sites(token, tmp_path, monkeypatch):
    def save(rank, group):
        Site(METHOD, rank, group, tmp_path / "in" / str(rank)).checkpoints.save(1)

    for message in errors_of(writer, lambda told: [token, told[1]], monkeypatch, save):
        assert "what site 1 says of a checkpoint cannot be" in message
    assert sorted(content(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


LISTINGS = {
    "id": [[9, 2, "../../x", [0, 1], False, ""]],
    "step": [["../9", 2, "3f9a2c", [0, 1], False, ""]],
    "sites": [[9, 10**9, "3f9a2c", [0, 1], False, ""]],
    "files": [[9, 2, "3f9a2c", ["/etc/passwd"], False, ""]],
    "negative": [[9, 2, "3f9a2c", [-1], False, ""]],
    "short": [[9, 2]],
    "nothing": None,
    "map": {"9": 2},
}


@pytest.mark.parametrize("told", LISTINGS.values(), ids=LISTINGS)
def test_checkpoints_that_lead_elsewhere_are_refused_on_all_sites(told, tmp_path, monkeypatch):
    def restore(rank, group):
        Site(METHOD, rank, group, tmp_path / str(rank)).checkpoints.restore()

    for message in errors_of(resume, lambda _: told, monkeypatch, restore):
        assert "what site 1 says of its checkpoints cannot be" in message


@pytest.mark.parametrize("told", [{}, {"failed": {"0": "x"}, "ranks": {}}, {"failed": {}}, None])
def test_a_site_tells_of_the_files_that_it_was_to_read(told, tmp_path, monkeypatch):
    saved_after([2], lambda rank: tmp_path / str(rank))

    def restore(rank, group):
        Site(METHOD, rank, group, tmp_path / str(rank)).checkpoints.restore()

    tell = lambda mine: told if isinstance(mine, dict) else mine  # noqa: E731
    for message in errors_of(resume, tell, monkeypatch, restore):
        assert "what site 1 says of the files that it read cannot be" in message


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", ".here-0-01234567", ".here-1-../../x", 7])
def test_a_mark_elsewhere_is_not_looked_for(name, tmp_path, monkeypatch):
    looked: list[str] = []
    monkeypatch.setattr(os.path, "exists", lambda path: looked.append(str(path)))
    tell = lambda mine: name if isinstance(mine, str) else mine  # noqa: E731
    make = lambda rank, group: Site(METHOD, rank, group, tmp_path)  # noqa: E731
    for message in errors_of(checkpoints, tell, monkeypatch, make):
        assert "what site 1 says of its folder cannot be" in message
    assert not [path for path in looked if "here" in path or "passwd" in path]
    assert not [*tmp_path.iterdir()]


def test_words_that_are_no_json_name_who_sent_them(tmp_path, monkeypatch):
    def make(rank, group):
        Site(METHOD, rank, group, tmp_path)

    def garbled(value):
        return "{" if threading.current_thread().name == f"rank {LIAR}" else str(value)

    monkeypatch.setattr("outergrad.checkpoint.messaging.json.dumps", garbled)
    for error in try_ranks(2, make):
        assert isinstance(error, ValueError)
        assert "is no JSON" in str(error)


def plant(folder: Path, step: int = 99_999_999) -> None:
    """A checkpoint of one site, later than all others."""
    save = max(saves_in(folder))
    planted = folder / str(Save(step, 1, "aaaaaa"))
    shutil.copytree(folder / str(save), planted)
    state = torch.load(planted / "site-1.pt", weights_only=True)
    state["state"]["rank"] = 0
    state["state"]["session"] |= {"rank": 0, "sites": 1}
    torch.save(state, planted / "site-0.pt")
    (planted / "site-1.pt").unlink()


def test_a_later_checkpoint_that_another_site_claims_is_not_taken(tmp_path, caplog):
    place = lambda rank: tmp_path / str(rank)  # noqa: E731
    saved_after([2, 4], place)
    plant(tmp_path / "1")
    for found in restored(place):
        assert (found.step, found.exact) == (4, True)
        assert any("step-99999999-of-1-aaaaaa is foreign to site 0" in s for s in found.skipped)
    assert "foreign to site 0" in caplog.text
    assert [found.step for found in restored(place, allow_foreign=True)] == [99_999_999] * 2


def test_nor_where_nothing_else_can_be_used(tmp_path):
    place = lambda rank: tmp_path / str(rank)  # noqa: E731
    saved_after([2], place)
    plant(tmp_path / "1")
    (save,) = saves_in(tmp_path / "0")
    (tmp_path / "0" / str(save) / "site-0.pt").write_bytes(b"")
    for message in refused(place):
        assert "is foreign to site 0" in message
        assert "let restore(allow_lost=True) go on" in message


def test_a_site_that_was_away_goes_back_to_what_all_know_or_takes_the_later_one(tmp_path):
    """As under torchrun with --nnodes 2:3, where every machine has a folder of its own."""
    place = lambda rank: tmp_path / str(rank)  # noqa: E731
    saved_after([2], place, sites=3)
    saved_after([4], place, sites=2, restore=False)
    assert [found.step for found in restored(place, sites=3)] == [2] * 3
    for found in restored(place, sites=3, allow_foreign=True):
        assert (found.step, found.saved_sites, found.new) == (4, 2, (2,))
    shutil.rmtree(tmp_path / "2")
    assert [found.step for found in restored(place, sites=3)] == [4] * 3


def test_a_site_goes_on_from_its_own_file_whatever_others_send(tmp_path, monkeypatch):
    place = lambda rank: tmp_path / str(rank)  # noqa: E731
    saved_after([2], place)

    def forging(comm, letters):
        """Site 0 sends everybody a part that nobody has asked for."""
        parts = {"model": {}, "optimizer": {}}
        forged = [{"rank": 1, "session": None, "parts": parts, "random": None}]
        return swapped(comm, [packed(forged)] * 2 if comm.rank == 0 else letters)

    monkeypatch.setattr(resume, "swapped", forging)
    assert [found.exact for found in restored(place)] == [True, True]


def test_what_is_told_is_checked_for_every_site():
    def form(rank, told):
        return {"fine": told}[f"{told}"]

    assert understood(["fine", "fine"], form, "it", sites_of(2, ())) == ["fine", "fine"]
    with pytest.raises(ValueError, match="what site 1 says of it cannot be"):
        understood(["fine", "odd"], form, "it", sites_of(2, ()))
