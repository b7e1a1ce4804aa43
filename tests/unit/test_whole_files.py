"""A file is there as a whole, or what was there before it."""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path

import pytest
import torch

import outergrad
from full_disk import longest_file, read_only, small_disk
from outergrad._whole_files import save_whole, whole_file, write_whole

WRITERS = {
    "text": lambda path: write_whole(path, "é" * 400_000),
    "tensors": lambda path: save_whole(path, {"weight": torch.zeros(200_000)}),
}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def error_of(write, path: Path) -> OSError:
    with pytest.raises(OSError, match=r"\[Errno") as error:
        write(path)
    return error.value


def unchanged_where(refused, path: Path, write) -> None:
    """Where it cannot be written, the error names the file, and what was there stays."""
    write_whole(path, "before")
    with refused:
        error = error_of(write, path)
    assert error.filename == str(path)
    assert error.strerror
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "before"


def test_a_file_that_does_not_fit_leaves_the_one_before(write, tmp_path):
    unchanged_where(longest_file(4096), tmp_path / "file", write)
    write(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size >= 800_000


def test_a_full_disk_does_too(write, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        unchanged_where(longest_file(1 << 30), disk / "file", write)


def test_a_disk_that_cannot_be_written_to_does_too(write, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        unchanged_where(read_only(disk), disk / "file", write)


def test_an_error_while_it_is_filled_does_too(tmp_path):
    def interrupted():
        with whole_file(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    write_whole(tmp_path / "file", "before")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "before"


@pytest.mark.parametrize("name", ["folder", "missing/file", "file/file"])
def test_where_there_cannot_be_a_file_nothing_is_left(name, write, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert error_of(write, tmp_path / name).filename == str(tmp_path / name)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_torchs_own_word_for_a_failed_write_is_an_oserror(tmp_path, monkeypatch):
    def failing(value, file):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="unexpected pos"):
        save_whole(tmp_path / "file", {})
    assert not [*tmp_path.iterdir()]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "content")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "content"


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_whole(tmp_path / "pipe", "content")
    reader.join(10)
    assert found == ["content"]
    assert (tmp_path / "pipe").is_fifo()


def test_no_file_of_the_library_is_written_at_its_final_name():
    """Emptying one, and lines that are appended, are no content that could be half there."""
    source = Path(outergrad.__file__).parent
    found = [
        f"{path.relative_to(source)}:{node.lineno}"
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("write_text", "write_bytes")
        if not (isinstance(node.args[0], ast.Constant) and not node.args[0].value)
    ]
    assert not found
