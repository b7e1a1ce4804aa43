"""Runs as pandas tables: what is read, what is left out, and what is said of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import outergrad as og
from made_up_run import TRAVELS, events, write_run
from outergrad._event_lines import line_of
from outergrad.events import Layer, Run, Scalars, Step

LAYERS = len(TRAVELS)


def write(path: Path, *lines: object, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + end)
    return path


def lines(steps: int = 40, rank: int = 0, sites: int = 1, **of_run: object) -> list[dict]:
    """A run of which every tenth step is recorded; `of_run` changes its first event."""
    found = [line_of(event) for event in events(rank, sites, steps, 10, 1.7e9)]
    found[0] |= of_run
    return found


def from_step(entries: list[dict], step: int) -> list[dict]:
    """What a process that goes on from there writes."""
    last = [e for e in entries[1:] if e["step"] >= step + (e["event"] == "scalars")]
    return [entries[0] | {"step": step}, *last]


def test_every_event_is_a_row_and_every_field_a_column(tmp_path):
    recording = og.report.load(write_run(tmp_path, sites=3, steps=100))
    kinds = ((Run, recording.runs), (Layer, recording.layers), (Step, recording.steps))
    for kind, table in kinds:
        assert {f.name for f in fields(kind)} - {"rank"} <= set(table.columns)
        assert set(table["site"]) == {0, 1, 2}
    assert len(recording.runs) == 3
    assert len(recording.steps) == 3 * 10
    assert len(recording.layers) == 3 * 10 * LAYERS
    assert list(recording.scalars.columns) == ["site", "step", "time", "name", "value"]
    assert len(recording.scalars) == 3 * (100 + 2)
    assert not recording.problems


def test_values_are_those_that_were_recorded(tmp_path):
    recording = og.report.load(write_run(tmp_path))
    first = recording.layers.iloc[0]
    assert (first["layer"], first["travels"]) == ("encoder.0.weight", "low rank")
    assert isinstance(first["singular_values"], list)
    assert first["discarded_energy"] == pytest.approx(0.2**2)
    assert recording.layers["residual_norm"].isna().sum() == 2 * 20 * 2
    assert math.isnan(recording.steps["seconds"].iloc[0])
    assert recording.scalars["value"].iloc[0] == pytest.approx(2.3)


def test_one_file_is_a_run_of_one_site(tmp_path):
    write_run(tmp_path)
    recording = og.report.load(tmp_path / "site-1.jsonl")
    assert set(recording.steps["site"]) == {1}
    assert recording.problems == ("1 of 2 sites are missing: 0",)


RUN, *REST = lines()
LAYER = next(e for e in REST if e["event"] == "layer")
UNREADABLE = {
    "unknown event": ({"event": "ghost"}, "line 2: an unknown event, 'ghost'"),
    "event of another type": ({"event": ["run"]}, "line 2: an unknown event, ['run']"),
    "not an event": ({"epoch": 1, "loss": 0.5}, "line 2: not an event"),
    "not JSON": ("loss=0.5", "line 2: not a whole line of JSON"),
    "another JSON": ([1, 2], "line 2: not a whole line of JSON"),
    "missing field": (
        {k: v for k, v in LAYER.items() if k != "travels"},
        "line 2: a layer without 'travels'",
    ),
    "text for a number": (LAYER | {"rows": "32"}, "line 2: a layer whose 'rows' cannot be read"),
    "too large": (LAYER | {"rows": 10**30}, "line 2: a layer whose 'rows' cannot be read"),
    "bad list": (LAYER | {"singular_values": ["a"]}, "whose 'singular_values' cannot be read"),
    "bad shapes": (RUN | {"shapes": {"w": ["a"]}}, "line 2: a run whose 'shapes' cannot be read"),
    "bad scalars": (
        {"event": "scalars", "rank": 0, "step": 1, "time": 0.0, "values": {"loss": "low"}},
        "line 2: a scalars whose 'values' cannot be read",
    ),
}


@pytest.mark.parametrize(("bad", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_named_and_the_rest_shown(tmp_path, bad, said):
    write(tmp_path / "site-0.jsonl", RUN, bad, *REST)
    recording = og.report.load(tmp_path)
    assert len(recording.problems) == 1
    assert recording.problems[0].startswith("site-0.jsonl, line 2: ")
    assert said in recording.problems[0]
    assert len(recording.steps) == 4
    assert len(recording.layers) == 4 * LAYERS


def test_problems_of_one_kind_are_one_line(tmp_path):
    write(tmp_path / "site-0.jsonl", RUN, *[{"event": "ghost"}] * 10, *REST)
    (problem,) = og.report.load(tmp_path).problems
    assert problem == "site-0.jsonl, lines 2, 3, 4 and 7 more: an unknown event, 'ghost'"


def test_fields_of_a_later_version_are_left_alone(tmp_path):
    write(tmp_path / "site-0.jsonl", *[entry | {"novelty": 1} for entry in lines()])
    recording = og.report.load(tmp_path)
    assert not recording.problems
    assert "novelty" not in recording.layers


def test_fields_that_were_not_measured_may_be_missing(tmp_path):
    short = {k: v for k, v in LAYER.items() if k not in ("cosine", "singular_values")}
    write(tmp_path / "site-0.jsonl", RUN, short)
    recording = og.report.load(tmp_path)
    assert not recording.problems
    assert recording.layers["cosine"].isna().all()
    assert recording.layers["singular_values"].iloc[0] is None


def test_numbers_that_are_not_finite_are_numbers(tmp_path):
    scalars = line_of(Scalars(rank=0, step=1, time=0.0, values={"loss": math.nan, "x": math.inf}))
    write(tmp_path / "site-0.jsonl", RUN, LAYER | {"cosine": math.nan}, scalars)
    recording = og.report.load(tmp_path)
    assert not recording.problems
    assert math.isnan(recording.scalars["value"].iloc[0])
    assert math.isinf(recording.scalars["value"].iloc[1])


def test_half_a_last_line_is_a_run_that_is_being_written(tmp_path):
    path = write(tmp_path / "site-0.jsonl", *lines(), json.dumps(LAYER)[:90], end="")
    recording = og.report.load(tmp_path)
    number = len(path.read_text().splitlines())
    assert recording.problems == (
        f"site-0.jsonl, line {number}: cut off: the run is still being written, or it died",
    )
    assert len(recording.layers) == 4 * LAYERS


def test_a_whole_last_line_needs_no_end(tmp_path):
    write(tmp_path / "site-0.jsonl", *lines(), end="")
    assert not og.report.load(tmp_path).problems


def test_a_run_that_goes_on_behind_half_a_line_is_one_run(tmp_path):
    entries = lines(steps=40)
    text = "\n".join(map(json.dumps, entries)) + "\n" + json.dumps(LAYER)[:90]
    again = "\n".join(map(json.dumps, from_step(entries, 20))) + "\n"
    (tmp_path / "site-0.jsonl").write_text(text + again)
    recording = og.report.load(tmp_path)
    assert list(recording.steps["step"]) == [0, 10, 20, 30]
    assert list(recording.runs["step"]) == [0, 20]
    assert len(recording.problems) == 1
    assert "not a whole line of JSON" in recording.problems[0]


def test_a_run_that_goes_on_takes_the_place_of_what_was_beyond_it(tmp_path):
    entries = lines(steps=40)
    again = from_step(entries, 20)
    for event in again:
        if event["event"] == "scalars":
            event["values"] = {"loss": 9.0}
    write(tmp_path / "site-0.jsonl", *entries, *again)
    recording = og.report.load(tmp_path)
    assert not recording.problems
    assert list(recording.steps["step"]) == [0, 10, 20, 30]
    assert len(recording.layers) == 4 * LAYERS
    losses = recording.scalars.set_index("step")["value"]
    assert losses.index.is_unique
    assert (losses[21:] == 9.0).all()
    assert (losses[:20] < 9.0).all()


def test_a_run_at_step_0_starts_anew(tmp_path):
    first, second = lines(steps=40), lines(steps=20, method="DAD()")
    write(tmp_path / "site-0.jsonl", *first, *second)
    recording = og.report.load(tmp_path)
    assert list(recording.runs["method"]) == ["DAD()"]
    assert list(recording.steps["step"]) == [0, 10]
    assert recording.problems == (
        f"site-0.jsonl: the run from line {len(first) + 1} on is shown, not those before it",
    )


def test_a_file_without_a_run_is_shown_all_the_same(tmp_path):
    write(tmp_path / "site-0.jsonl", *REST)
    recording = og.report.load(tmp_path)
    assert recording.runs.empty
    assert len(recording.steps) == 4
    assert "does not begin with a run" in recording.problems[0]


def test_what_sites_say_of_each_other_is_checked(tmp_path):
    write(tmp_path / "site-0.jsonl", *lines(sites=3))
    write(tmp_path / "site-1.jsonl", *lines(sites=3, rank=1, steps=20, method="DAD()"))
    problems = og.report.load(tmp_path).problems
    assert problems == (
        "1 of 3 sites are missing: 2",
        "the sites differ in method: RankDAD(rank=4), DAD()",
        "the sites' records do not end at the same step: site 0 at step 30, site 1 at step 10",
    )


def test_a_site_is_shown_once(tmp_path):
    write(tmp_path / "site-0.jsonl", *lines())
    write(tmp_path / "site-1.jsonl", *lines())
    recording = og.report.load(tmp_path)
    assert len(recording.steps) == 4
    assert recording.problems == ("site-1.jsonl: left out: of site 0, as site-0.jsonl is",)


def test_an_empty_file_beside_others_is_named(tmp_path):
    write(tmp_path / "site-0.jsonl", *lines(sites=2))
    write(tmp_path / "site-1.jsonl", end="")
    assert og.report.load(tmp_path).problems == (
        "site-1.jsonl: empty",
        "1 of 2 sites are missing: 1",
    )


def test_bytes_that_are_no_text_are_a_problem_only(tmp_path):
    write(tmp_path / "site-0.jsonl", *lines())
    (tmp_path / "site-1.jsonl").write_bytes(bytes(range(256)))
    recording = og.report.load(tmp_path)
    assert len(recording.steps) == 4
    assert recording.problems[0].startswith("site-1.jsonl, ")


NOTHING = {
    "no folder": (lambda path: path / "none", "No such file or directory"),
    "empty folder": (lambda path: path, "there is no site-0.jsonl"),
    "empty file": (lambda path: write(path / "site-0.jsonl", end=""), "site-0.jsonl: empty"),
    "foreign file": (
        lambda path: write(path / "log.jsonl", {"epoch": 1}),
        "log.jsonl, line 1: not an event",
    ),
}


@pytest.mark.parametrize(("make", "said"), NOTHING.values(), ids=NOTHING)
def test_nothing_to_show_is_an_error_that_names_the_run(tmp_path, make, said):
    run = make(tmp_path)
    with pytest.raises(og.report.UnreadableRunError, match=said) as raised:
        og.report.load(run)
    assert str(raised.value).startswith(str(run))


def test_without_pandas_load_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("outergrad.core.packages.is_installed", lambda name: False)
    with pytest.raises(ImportError, match=r"pandas not found: pip install 'pandas>=2.2'"):
        og.report.load(tmp_path)


@pytest.mark.slow
def test_importing_outergrad_imports_neither_pandas_nor_plotly():
    code = (
        "import sys, outergrad as og; og.report.load; print({'pandas', 'plotly'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "set()\n", done.stderr
