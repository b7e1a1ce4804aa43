"""Events as lines of JSON, and back."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace

import pytest
from event_examples import EVENTS, LAYER, RUN, SCALARS, STEP

from made_up_run import events, write_run
from outergrad._event_lines import event_of, line_of
from outergrad.record.jsonl import JSONL


def read(path):
    return [event_of(json.loads(line)) for line in path.read_text().splitlines()]


def test_every_kind_is_written_behind_its_name():
    assert [line_of(e)["event"] for e in (RUN, LAYER, STEP, SCALARS)] == [
        "run",
        "layer",
        "step",
        "scalars",
    ]


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_a_line_gives_the_event_back(event):
    assert event_of(json.loads(json.dumps(line_of(event)))) == event


def test_what_is_not_finite_comes_back():
    event = replace(SCALARS, values={"loss": float("inf")})
    assert event_of(json.loads(json.dumps(line_of(event)))) == event


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_what_must_be_told_is_missed_by_name(event):
    line = line_of(event)
    for field in fields(event):
        without = {k: v for k, v in line.items() if k != field.name}
        if field.default is MISSING:
            with pytest.raises(ValueError, match=f"without '{field.name}'"):
                event_of(without)
        else:
            assert getattr(event_of(without), field.name) == field.default


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_what_is_of_another_type_is_named(event):
    for field in fields(event):
        with pytest.raises(ValueError, match=f"whose '{field.name}' cannot be read"):
            event_of({**line_of(event), field.name: object()})


def test_fields_of_a_later_version_are_passed_over():
    assert event_of({**line_of(STEP), "joules": 3.0}) == STEP


FOREIGN = {
    "a number": (3, "not an event"),
    "a list": ([], "not an event"),
    "no kind": ({}, "not an event"),
    "another kind": ({"event": "epoch"}, "an unknown event, 'epoch'"),
    "a truth": ({**line_of(STEP), "step": True}, "a step whose 'step' cannot be read"),
    "a fraction": ({**line_of(STEP), "step": 0.5}, "a step whose 'step' cannot be read"),
    "no shape": ({**line_of(RUN), "shapes": {"w": 3}}, "a run whose 'shapes' cannot be read"),
    "no number": ({**line_of(SCALARS), "values": {"loss": "low"}}, "whose 'values' cannot be read"),
}


@pytest.mark.parametrize(("line", "said"), FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_event_is_refused(line, said):
    with pytest.raises(ValueError, match=said):
        event_of(line)


def test_each_site_has_a_file(tmp_path):
    write_run(tmp_path / "run", sites=3, steps=20)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        f"site-{rank}.jsonl" for rank in range(3)
    ]
    for rank in range(3):
        assert read(tmp_path / "run" / f"site-{rank}.jsonl") == events(rank, 3, 20, 10, 1.7e9)


def test_a_line_is_there_at_once(tmp_path):
    recorder = JSONL(tmp_path)
    recorder.record(STEP)
    assert read(tmp_path / "site-1.jsonl") == [STEP]
    recorder.close()


def test_another_run_is_appended(tmp_path):
    for event in (RUN, STEP):
        recorder = JSONL(str(tmp_path))
        recorder.record(event)
        recorder.close()
    assert read(tmp_path / "site-1.jsonl") == [RUN, STEP]


def test_closed_twice_and_opened_again(tmp_path):
    recorder = JSONL(tmp_path)
    recorder.close()
    recorder.record(RUN)
    recorder.close()
    recorder.close()
    recorder.record(STEP)
    recorder.close()
    assert read(tmp_path / "site-1.jsonl") == [RUN, STEP]


def test_half_a_line_of_a_run_that_died_does_not_swallow_the_next(tmp_path):
    file = tmp_path / "site-1.jsonl"
    file.write_text('{"event": "st')
    recorder = JSONL(tmp_path)
    recorder.record(RUN)
    recorder.close()
    assert event_of(json.loads(file.read_text().splitlines()[1])) == RUN


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match=r"run' is a file; name a folder for the run"):
        JSONL(tmp_path / "run")


@pytest.mark.parametrize("every", [0, -1])
def test_every_is_1_or_more(tmp_path, every):
    with pytest.raises(ValueError, match=f"every={every}; use 1 or more"):
        JSONL(tmp_path, every=every)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"JSONL cannot write: .*file/run/site-1\.jsonl"):
        JSONL(tmp_path / "file" / "run").record(RUN)


def test_a_full_disk_is_told_with_the_file(tmp_path):
    (tmp_path / "site-1.jsonl").symlink_to("/dev/full")
    recorder = JSONL(tmp_path)
    with pytest.raises(OSError, match=r"JSONL cannot write: No space left .*site-1\.jsonl"):
        recorder.record(RUN)
    recorder.close()
