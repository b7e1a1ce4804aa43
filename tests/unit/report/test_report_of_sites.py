"""The report's table of sites: names, figures with intervals, and none where nothing is known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from made_up_run import HOSPITALS, evaluation, write_hospitals, write_run
from outergrad.record.jsonl import JSONL
from outergrad.report import load
from outergrad.report.series import series
from outergrad.report.sites import site_names, site_section


def rows_of(section: str) -> list[str]:
    return re.findall(r"<tr data-run.*?</tr>", section)


def test_sites_are_called_by_their_names(tmp_path):
    recording = load(write_hospitals(tmp_path))
    assert site_names(recording) == dict(enumerate(HOSPITALS))
    assert series(recording)["names"] == dict(enumerate(HOSPITALS))


def test_sites_without_names_have_numbers(tmp_path):
    assert site_names(load(write_run(tmp_path))) == {0: "site 0", 1: "site 1"}


def test_without_evaluations_there_is_no_section(tmp_path):
    assert site_section({"run": load(write_run(tmp_path))}) == ""


def test_each_site_has_its_last_figures_with_intervals(tmp_path):
    rows = rows_of(site_section({"run": load(write_hospitals(tmp_path))}))
    for rank, (name, row) in enumerate(zip(HOSPITALS, rows, strict=True)):
        last = evaluation(rank, 200)
        assert name in row
        assert f'data-head="Rows">{last.rows}<' in row
        value, low, high = (100 * v for v in last.figures["accuracy"])
        assert f"{value:.1f} % <span class=interval>[{low:.1f}, {high:.1f} %]" in row
        assert f"{last.gains['auc'][0]:+.3f}" in row


def test_several_runs_stand_side_by_side_at_each_site(tmp_path):
    runs = {name: load(write_hospitals(tmp_path / name)) for name in ("first", "second")}
    rows = rows_of(site_section(runs))
    assert [row[13:14] for row in rows] == ["0", "1"] * 3
    assert all("first" in row for row in rows[::2])


def test_drawn_intervals_hold_their_value_and_stay_on_their_axis(tmp_path):
    section = site_section({"run": load(write_hospitals(tmp_path))})
    strips = re.findall(
        r"<i style=left:([\d.]+)%;width:([\d.]+)%></i><b style=left:([\d.]+)", section
    )
    assert len(strips) == 4 * len(HOSPITALS)
    for left, width, at in (map(float, strip) for strip in strips):
        assert 0 <= left <= at <= left + width + 0.1 <= 100.2


def test_figures_of_others_get_columns_and_what_is_missing_a_dash(tmp_path):
    write_run(tmp_path, sites=2)
    add(tmp_path, 0, rows=0, shares={}, figures={"F1 <b>": (0.5,)}, alone={}, gains={})
    add(tmp_path, 1, rows=0, shares={}, figures={"AUROC": (float("nan"),)}, alone={}, gains={})
    section = site_section({"run": load(tmp_path)})
    assert "F1 &lt;b&gt;" in section
    assert "AUROC" not in section
    assert [row.count("\N{EN DASH}") for row in rows_of(section)] == [2, 3]


def add(folder: Path, rank: int, **fields) -> None:
    recorder = JSONL(folder)
    recorder.record(replace(evaluation(rank, 200), calibration=(), **fields))
    recorder.close()


def test_many_classes_are_counted(tmp_path):
    write_run(tmp_path, sites=1)
    add(tmp_path, 0, shares={str(k): 0.1 for k in range(10)})
    assert "10 classes, 10 to 10 %" in site_section({"run": load(tmp_path)})
