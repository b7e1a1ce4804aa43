"""What was measured is shown and kept, whatever comes after."""

from __future__ import annotations

import json

import pytest
from made_up import link, results, timed_links, timing

from outergrad.launch.errors import CheckError, RecipeError
from outergrad.launch.links import parse_link
from outergrad_lab.bench import report as module
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.report import Report, result_file

RIGHT, WRONG = timing("dad", claimed_bytes=950_000.0), timing("dense", claimed_bytes=5.0)


def tell(path, *timings, checked=False, verbose=False, notes=()):
    """Reports of one link and ends."""
    found = results(link(timings=list(timings)))
    report = Report(path, checked=checked, verbose=verbose)
    report.begin(notes)
    report.link_done(found, found.links[0])
    report.end(found)


def test_the_last_line_says_where_the_results_are(tmp_path, capsys):
    pytest.importorskip("seaborn")
    tell(tmp_path / "a.json", timing("ddp"), timing("dad"), notes=["2 cores only"])
    note, *_, last = capsys.readouterr().out.splitlines()
    assert note == "Note: 2 cores only."
    assert last == f"results: {tmp_path / 'a.json'} and {tmp_path / 'a.png'}"
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_without_the_extra_it_says_so_and_the_results_are_there(monkeypatch, tmp_path, capsys):
    installed = "outergrad.core.packages.is_installed"
    monkeypatch.setattr(installed, lambda name: name == "pandas")
    tell(tmp_path / "a.json", timing("ddp"))
    last = capsys.readouterr().out.splitlines()[-1]
    said = "(no plot: matplotlib, seaborn not found: pip install 'matplotlib>=3.8' 'seaborn>=0.13')"
    assert last == f"results: {tmp_path / 'a.json'} {said}"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_each_link_is_saved_when_it_is_done(tmp_path, capsys):
    first, second = timed_links("10mbit", "none")
    found = results(first)
    report = Report(tmp_path / "a.json", checked=False, verbose=False)
    report.link_done(found, first)
    assert len(json.loads((tmp_path / "a.json").read_text())["links"]) == 1
    found.links.append(second)
    report.link_done(found, second)
    assert len(json.loads((tmp_path / "a.json").read_text())["links"]) == 2
    assert capsys.readouterr().out.count("mlp, 2 sites") == 2


@pytest.mark.parametrize(("verbose", "shown"), [(True, True), (False, False)])
def test_phases_are_shown_to_whom_wants_to_know(tmp_path, capsys, verbose, shown):
    tell(tmp_path / "a.json", timing("dad"), verbose=verbose)
    assert ("dad: forward 40.0, backward 60.0" in capsys.readouterr().out) is shown


def test_right_counts_are_told(tmp_path, capsys):
    tell(tmp_path / "a.json", timing("ddp"), RIGHT, checked=True)
    assert "dad: session.stats() says 950,000 bytes" in capsys.readouterr().out


def test_a_wrong_count_fails_after_all_is_saved(tmp_path, capsys):
    with pytest.raises(CheckError, match=r"^--check: 1 of 2 counts are wrong$"):
        tell(tmp_path / "a.json", RIGHT, WRONG, checked=True)
    shown = capsys.readouterr().out
    assert "dense: session.stats() says 5 bytes per step, which DIFFERS from" in shown
    assert shown.splitlines()[-1].startswith("results: ")
    assert (tmp_path / "a.json").exists()


def test_nothing_to_check_is_a_failure(tmp_path):
    with pytest.raises(CheckError, match=r"^--check has nothing to compare: .*--methods"):
        tell(tmp_path / "a.json", timing("ddp"), checked=True)
    assert (tmp_path / "a.json").exists()


def test_a_file_is_named_by_what_is_measured(tmp_path):
    links = [parse_link("10mbit", "40ms"), parse_link("none")]
    path = result_file(tmp_path, Plan(workload="gru", sites=4), links)
    assert path.parent == tmp_path
    assert path.name.startswith("gru_4-sites_10mbit-40ms_none_20")
    assert path.suffix == ".json"
    assert "_until_" in result_file(tmp_path, Plan(until_loss=1.0), links).name


def test_a_file_may_be_named_by_the_user(tmp_path):
    assert result_file(tmp_path / "mine.json", Plan(), []) == tmp_path / "mine.json"


def test_an_impossible_place_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    impossible = {
        tmp_path / "file" / "a.json": "File exists",
        tmp_path / "file" / "deep" / "a.json": "Not a directory",
        tmp_path / "folder.json": "cannot be written",
    }
    for path, why in impossible.items():
        with pytest.raises(RecipeError, match=rf"^--out .*: {why}$") as caught:
            Report(path, checked=False, verbose=False)
        assert "\n" not in str(caught.value)


def test_a_folder_that_may_not_be_written_is_told_too(monkeypatch, tmp_path):
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    with pytest.raises(RecipeError, match=rf"^--out {tmp_path}/a.json: cannot be written$"):
        Report(tmp_path / "a.json", checked=False, verbose=False)


def test_a_place_that_is_lost_later_is_told_in_one_line(tmp_path, capsys):
    folder = tmp_path / "lost"
    report = Report(folder / "a.json", checked=False, verbose=False)
    folder.rmdir()
    folder.touch()
    with pytest.raises(RecipeError, match=r"^--out .*a\.json: "):
        report.link_done(results(link()), link(timings=[timing("dad")]))
    assert "dad" in capsys.readouterr().out
