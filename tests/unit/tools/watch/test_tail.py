"""What was appended to files, however it gets there."""

from __future__ import annotations

import json
import os

import pytest

from made_up_run import write_run
from outergrad._event_lines import GrowingFile, line_of
from outergrad.events import Run, Scalars
from outergrad.tools.watch.live import Folder


def line(step: int) -> str:
    event = Scalars(rank=0, step=step, time=1.7e9, values={"loss": 0.5})
    return json.dumps(line_of(event)) + "\n"


HALF = line(7)

# What is written between looks, and the steps that each look finds.
WRITTEN = {
    "line by line": ([line(1), line(2), line(3)], [[1], [2], [3]]),
    "several at once": ([line(1) + line(2), line(3)], [[1, 2], [3]]),
    "nothing": (["", line(1), ""], [[], [1], []]),
    "half a line": ([line(1) + HALF[:20], HALF[20:]], [[1], [7]]),
    "half, then more": ([HALF[:20], HALF[20:40], HALF[40:] + line(8)], [[], [], [7, 8]]),
    "no end yet": ([HALF[:-1], "\n"], [[], [7]]),
    "foreign lines": (["Traceback\n" + line(1) + "{}\n3\n", line(2)], [[1], [2]]),
    "behind half a line": ([HALF[:20] + line(8), line(9)], [[8], [9]]),
    "empty lines": (["\n\n" + line(1) + "\n"], [[1]]),
}
FOREIGN = {"foreign lines": 3, "behind half a line": 1}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_whole_line_is_read_once(tmp_path, name):
    folder, file = Folder(tmp_path), tmp_path / "site-0.jsonl"
    for text, steps in zip(*WRITTEN[name], strict=True):
        with file.open("a") as opened:
            opened.write(text)
        assert [event.step for event, _ in folder.news()] == steps
    assert folder.foreign == FOREIGN.get(name, 0)


def test_letters_may_be_cut_apart(tmp_path):
    event = Scalars(rank=0, step=1, time=1.7e9, values={"Verlust π": 0.5})
    text = (json.dumps(line_of(event), ensure_ascii=False) + "\n").encode()
    folder, file = Folder(tmp_path), tmp_path / "site-0.jsonl"
    cut = text.index("π".encode()) + 1
    file.write_bytes(text[:cut])
    assert [*folder.news()] == []
    with file.open("ab") as opened:
        opened.write(text[cut:])
    assert [found for found, _ in folder.news()] == [event]


def test_files_may_come_later(tmp_path):
    folder = Folder(tmp_path / "run")
    assert [*folder.news()] == []
    for rank in range(3):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / f"site-{rank}.jsonl").write_text(line(rank))
        assert [event.step for event, _ in folder.news()] == [rank]


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "log.jsonl").write_text("{}\n")
    folder = Folder(tmp_path)
    assert [*folder.news()] == []
    assert folder.foreign == 0


def test_a_file_that_was_cut_is_read_again(tmp_path):
    folder, file = Folder(tmp_path), tmp_path / "site-0.jsonl"
    file.write_text(line(1) + line(2) + HALF[:20])
    assert len([*folder.news()]) == 2
    file.write_text(line(9))
    assert [event.step for event, _ in folder.news()] == [9]


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    folder, file = Folder(tmp_path), tmp_path / "site-0.jsonl"
    file.write_text(line(1))
    assert len([*folder.news()]) == 1
    (tmp_path / "new").write_text(line(8) + line(9))
    (tmp_path / "new").rename(file)
    assert [event.step for event, _ in folder.news()] == [8, 9]


def test_a_file_may_go_away(tmp_path):
    folder, file = Folder(tmp_path), tmp_path / "site-0.jsonl"
    file.write_text(line(1))
    assert len([*folder.news()]) == 1
    file.unlink()
    assert [*folder.news()] == []


def test_when_the_file_was_written_to_is_told(tmp_path):
    file = tmp_path / "site-0.jsonl"
    file.write_text(line(1))
    os.utime(file, (5.0, 5.0))
    assert [written for _, written in Folder(tmp_path).news()] == [5.0]


def test_of_a_large_file_the_beginnings_of_runs_and_the_end_are_read(tmp_path):
    write_run(tmp_path, sites=1, steps=300)
    write_run(tmp_path, sites=1, steps=300)
    file = tmp_path / "site-0.jsonl"
    everything = file.read_text().splitlines()
    read, _ = GrowingFile(file, recent_bytes=10_000).lines()
    runs = [text for text in read if json.loads(text)["event"] == Run.__name__.lower()]
    assert len(runs) == 2
    end = read[2:]
    assert end == everything[-len(end) :]
    assert 9_000 < sum(map(len, end)) <= 10_000
