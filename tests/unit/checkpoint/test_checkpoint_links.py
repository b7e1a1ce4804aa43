"""What others put into a folder of checkpoints: links are replaced, not written through."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from torch import nn

from outergrad._whole_files import load_plain, save_whole, whole_file, write_whole
from outergrad.checkpoint import folder as files
from outergrad.checkpoint.folder import DamagedError, Save
from outergrad.checkpoint.messaging import unpacked

SAVE = Save(2, 2, "abcdef")


@pytest.fixture
def victim(tmp_path):
    """A file that nobody means to change."""
    path = tmp_path / "victim"
    path.write_text("as it was")
    return path


def by_save_whole(path):
    save_whole(path, {"a": torch.ones(2)})


def by_write(path):
    files.write(path, {"a": torch.ones(2)})


def by_write_whole(path):
    write_whole(path, "text", through_links=False)


WRITERS = [by_save_whole, by_write, by_write_whole]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_link_is_replaced(write, tmp_path, victim):
    path = tmp_path / "site-0.pt"
    path.symlink_to(victim)
    write(path)
    assert victim.read_text() == "as it was"
    assert not path.is_symlink()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_pipe_is_replaced(write, tmp_path):
    path = tmp_path / "site-0.pt"
    os.mkfifo(path)
    write(path)
    assert path.is_file()


def test_a_folder_that_is_a_link_is_a_users_own(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "scratch")
    by_save_whole(tmp_path / "saved" / "x.pt")
    assert (tmp_path / "scratch" / "x.pt").is_file()


def test_what_a_user_names_is_written_through_a_link(tmp_path, victim):
    """As a report under a name that leads elsewhere."""
    (tmp_path / "report.html").symlink_to(victim)
    with whole_file(tmp_path / "report.html") as file:
        file.write(b"new")
    assert victim.read_text() == "new"


def test_the_mark_of_an_unfinished_one_is_not_written_through(tmp_path, victim):
    (tmp_path / str(SAVE)).mkdir()
    (tmp_path / str(SAVE) / "unfinished").symlink_to(victim)
    files.begin(tmp_path, SAVE)
    assert victim.read_text() == "as it was"


def test_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / str(SAVE)).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link, not a folder"):
        files.begin(tmp_path, SAVE)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_pipe_does_not_hold_up_whoever_reads(tmp_path):
    os.mkfifo(tmp_path / "site-0.pt")
    with pytest.raises(DamagedError, match="it is no file"):
        files.read(tmp_path / "site-0.pt")
    with pytest.raises(OSError, match="no such file"):
        load_plain(tmp_path / "site-0.pt")


class Harm:
    def __reduce__(self):
        return os.getcwd, ()


STRANGE = {
    "a function": (Harm(), r"it holds posix.getcwd, which is none of tensors"),
    "a class": (nn.Linear(2, 2), r"it holds torch.nn.modules.linear.Linear, which is none of"),
}


@pytest.mark.parametrize(("value", "told"), STRANGE.values(), ids=STRANGE)
def test_nobody_is_advised_to_read_it_all_the_same(value, told, tmp_path):
    torch.save({"x": value}, tmp_path / "site-0.pt")
    with pytest.raises(DamagedError, match=told) as in_folder:
        files.read(tmp_path / "site-0.pt")
    with pytest.raises(ValueError, match=told) as in_message:
        unpacked((tmp_path / "site-0.pt").read_bytes())
    for raised in (in_folder, in_message):
        assert "weights_only" not in str(raised.value)
        assert "safe_globals" not in str(raised.value)


def test_a_file_without_an_archive_is_told_of_in_own_words(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps(Harm(), protocol=2))
    with pytest.raises(ValueError, match=r"it holds posix\.getcwd, which is none of"):
        load_plain(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"no pickle at all")
    with pytest.raises(ValueError, match="it is damaged, or holds something else") as raised:
        load_plain(tmp_path / "y")
    assert "weights_only" not in str(raised.value)
