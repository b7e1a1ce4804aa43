"""A statement says what a record says, and nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from made_up_run import HOSPITALS, START, write_hospitals, write_run
from outergrad.events import Change, Event, Exchange, Mishap
from outergrad.record.jsonl import JSONL
from outergrad.report import UnreadableRunError
from outergrad.report.statement import UNKNOWN, as_text, statement_of, write_statement
from outergrad.tools.commands.app import app

CHANGE = Change(
    rank=0,
    step=120,
    time=START + 12,
    epoch=1,
    sites=("hospital-a", "hospital-c"),
    lost=("hospital-b",),
    back=(),
    why={"hospital-b": "it was revoked"},
)


def add(folder: Path, *events: Event) -> None:
    recorder = JSONL(folder)
    for event in events:
        recorder.record(event)
    recorder.close()


def facts(*records: Path) -> dict[str, dict[str, str]]:
    return {part.heading: dict(part.facts) for part in statement_of(records)}


def test_names_times_methods_and_transport_are_those_of_the_record(tmp_path):
    told = facts(write_hospitals(tmp_path))
    assert [*told["Who took part"]][:3] == [*HOSPITALS]
    who = told["Who took part"]["hospital-b"]
    assert who.startswith("from 2023-11-14 22:13 UTC to 2023-11-14 22:13 UTC, 200 steps")
    assert told["How sites learned together"]["Method"] == "RankDAD(rank=4)"
    assert told["How sites learned together"]["Evaluated by hospital-c"].startswith(
        "4 times, on 44"
    )
    assert told["On the way"]["Transport and encryption"].startswith("a hub at hub.example.org")
    assert told["Software"]["Commit checked out beside it"].startswith("0123456789")
    assert told["Ledger of privacy"] == {"Kept": "none was kept"}


def test_what_others_learn_is_said_once_for_sites_alike(tmp_path):
    told = facts(write_hospitals(tmp_path))["What each other site could learn"]
    assert [*told][:-2] == [f"Of {', '.join(HOSPITALS)}"]
    assert "this site's gradient" in told[f"Of {', '.join(HOSPITALS)}"]


def test_bytes_are_those_of_the_last_step_and_of_a_process_before(tmp_path):
    folder = write_run(tmp_path, sites=1)
    assert facts(folder)["What travelled"]["Sent by site 0"].startswith("1.75 MB")
    lines = (folder / "site-0.jsonl").read_text().splitlines()
    again = [json.loads(lines[0]) | {"step": 200}, json.loads(lines[1]) | {"step": 200}]
    step = next(json.loads(line) for line in lines if '"event": "step"' in line)
    again.append(step | {"step": 200, "total_sent_bytes": 39_000})
    with (folder / "site-0.jsonl").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in again)
    assert facts(folder)["What travelled"]["Sent by site 0"].startswith("1.79 MB")


def test_what_is_not_recorded_is_said_to_be_so(tmp_path):
    told = facts(write_run(tmp_path, sites=2))
    assert told["On the way"]["Transport and encryption"] == UNKNOWN
    assert told["How sites learned together"]["Transform of gradients"] == UNKNOWN
    assert told["What each other site could learn"]["Of site 0, site 1"] == UNKNOWN
    assert told["What travelled"]["Buffers"] == UNKNOWN
    assert [told["Software"][n] for n in ("Model", "Python")] == [UNKNOWN, UNKNOWN]


def test_a_site_without_a_record_is_named_all_the_same(tmp_path):
    folder = write_hospitals(tmp_path)
    (folder / "site-1.jsonl").unlink()
    told = facts(folder)
    assert told["Who took part"]["hospital-b"] == "took part; no record here"
    assert "1 of 3 sites are missing" in told["Records"]["Doubts"]


def test_files_of_one_session_may_lie_apart(tmp_path):
    folder = write_hospitals(tmp_path / "all")
    apart = [tmp_path / name / f"site-{rank}.jsonl" for rank, name in enumerate(HOSPITALS)]
    for path in apart:
        path.parent.mkdir()
        (folder / path.name).rename(path)
    together = facts(*(path.parent for path in apart))
    assert together == facts(*apart)
    assert all("200 steps" in together["Who took part"][name] for name in HOSPITALS)


@pytest.mark.parametrize("why", [{"hospital-b": "it was revoked"}, None])
def test_a_site_that_was_lost_is_named_with_the_reason(tmp_path, why):
    folder = write_hospitals(tmp_path)
    add(folder, *(replace(CHANGE, rank=rank, why=why) for rank in (0, 2)))
    told = facts(folder)["Who took part"]["hospital-b lost"]
    assert told == f"from step 120 on: {'it was revoked' if why else UNKNOWN}"


def test_a_site_that_was_late_is_named_with_the_number_of_exchanges(tmp_path):
    folder = write_hospitals(tmp_path)
    for number, late in enumerate([(), ("hospital-b",), (), ("hospital-b",)]):
        there = tuple(name for name in HOSPITALS if name not in late)
        about = {"step": 120, "time": START + 12, "number": number}
        add(folder, *(Exchange(rank=r, **about, took_part=there, late=late) for r in (0, 2)))
    told = facts(folder)["Who took part"]["Late"]
    assert told.startswith("hospital-b was late for 2 of 4 exchanges, last for exchange 3;")


def test_a_loss_after_a_change_is_of_the_site_that_has_the_number_then(tmp_path):
    folder = write_hospitals(tmp_path)
    lost = {"what": "lost", "sites": (1,), "layer": ""}
    add(folder, CHANGE, Mishap(rank=0, step=150, time=START + 15, **lost))
    assert facts(folder)["Who took part"]["Lost"] == "hospital-c, in step 150"


def test_each_file_is_told_by_its_digest(tmp_path):
    folder = write_hospitals(tmp_path)
    content = (folder / "site-2.jsonl").read_bytes()
    assert hashlib.sha256(content).hexdigest() in facts(folder)["Records"]["site-2.jsonl"]


def test_names_are_no_markup_and_no_control_characters(tmp_path):
    folder = write_run(tmp_path, sites=1)
    lines = (folder / "site-0.jsonl").read_text().splitlines()
    run = json.loads(lines[0]) | {"name": "<script>x</script>", "took_part": ["\x1b[31mred"]}
    (folder / "site-0.jsonl").write_text("\n".join([json.dumps(run), *lines[1:]]) + "\n")
    sections = statement_of([folder])
    assert "\x1b" not in as_text(sections)
    write_statement(sections, tmp_path / "page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text()


def test_text_fits_a_terminal_and_is_dated(tmp_path):
    text = as_text(statement_of([write_hospitals(tmp_path)], datetime(2030, 1, 2)))
    assert "2030-01-0" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_writes_a_page_or_prints(tmp_path):
    folder, page = write_hospitals(tmp_path / "run"), tmp_path / "page.html"
    printed = CliRunner().invoke(app, ["statement", str(folder), "--text"])
    assert "hospital-b" in printed.output
    assert not page.exists()
    assert CliRunner().invoke(app, ["statement", str(folder), "-o", str(page)]).exit_code == 0
    assert "hospital-b" in page.read_text()


def test_what_cannot_be_read_is_told_in_a_line(tmp_path):
    with pytest.raises(UnreadableRunError, match="no site-0"):
        statement_of([tmp_path])
    found = CliRunner().invoke(app, ["statement", str(tmp_path)])
    assert found.exit_code == 2
