"""What is on the page, and what the command says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pages import RUNS, page_of, write_bare
from typer.testing import CliRunner

from full_disk import longest_file
from made_up_run import DENSE_BYTES, MACHINE, TRAVELS, write_run
from outergrad._event_lines import line_of
from outergrad.events import End, Trial
from outergrad.report import load, write_page
from outergrad.report.page import names
from outergrad.report.recording import thin
from outergrad.report.series import series
from outergrad.report.summary import summary, time_split, verdict
from outergrad.tools.commands.app import app


def report(*args: object):
    return CliRunner().invoke(app, ["report", *map(str, args)])


def data_of(page: Path) -> list[dict]:
    text = page.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1], parse_constant=pytest.fail)


@pytest.mark.parametrize("name", RUNS)
def test_every_run_makes_a_page_of_finite_numbers(tmp_path, name):
    (run,) = data_of(page_of(tmp_path, name))
    assert run["name"] == name.replace(" ", "-")


def test_the_page_begins_with_a_summary(tmp_path):
    text = page_of(tmp_path, "whole").read_text("utf-8")
    summary = text[text.index("<table") : text.index("</table>")]
    cells = re.findall(r'<td data-head="([^"]*)">([^<]*)', summary)
    assert dict(cells) == {
        "Sites": "2",
        "Steps": "200",
        "Sent per step": "9 kB",
        "Fewer bytes than DDP": f"{DENSE_BYTES / 9000:.2g}\N{MULTIPLICATION SIGN}",
        "Time per step": "100 ms",
        "Noise scale": "1.6 batches",
        "Final loss": "0.1962",
        "Final accuracy": "0.9169",
    }
    assert "RankDAD(rank=4)" in summary


def test_the_page_opens_with_a_sentence(tmp_path):
    text = page_of(tmp_path, "whole").read_text("utf-8")
    (said,) = re.findall("<p class=verdict>([^<]*)</p>", text)
    assert said == f"{verdict(load(tmp_path / 'whole'))}."
    assert text.index("<p class=verdict>") < text.index("<table")
    few = page_of(tmp_path / "few", "whole", "bare").read_text("utf-8")
    assert re.search("<p class=verdict>(whole|bare): ", few)


def test_bars_are_as_long_as_their_values(tmp_path):
    text = page_of(tmp_path, "whole").read_text("utf-8")
    sent, time = re.findall(r"<i style=width:(\d+)%>", text[: text.index("</table>")])
    assert int(sent) == round(100 * 9000 / DENSE_BYTES)
    assert time == "100"


def test_settings_and_machines_stand_in_a_panel(tmp_path):
    text = page_of(tmp_path, "whole").read_text("utf-8")
    panel = text[text.index("<details class=settings>") :]
    said = dict(re.findall("<dt>([^<]*)</dt><dd>([^<]*)</dd>", panel[: panel.index("</details>")]))
    assert said["Method"] == "RankDAD(rank=4)"
    assert said["Versions"] == "outergrad 0.1.0, torch 2.13.0"
    assert said["site 0"] == said["site 1"] == MACHINE
    assert "settings>" not in page_of(tmp_path / "none", "layers alone").read_text("utf-8")


def test_live_follows_a_run_until_it_ends(tmp_path, monkeypatch):
    run, page, told = write_run(tmp_path / "run", sites=1), tmp_path / "page.html", []

    def later(seconds):
        told.append(page.read_text("utf-8"))
        if len(told) == 2:
            end = line_of(End(rank=0, step=200, time=1.7e9))
            with (run / "site-0.jsonl").open("a") as file:
                file.write(json.dumps(end) + "\n")

    monkeypatch.setattr("outergrad.tools.commands.report.time.sleep", later)
    assert report(run, "--live", "-o", page).exit_code == 0
    reloading = '<meta http-equiv="refresh" content="5">'
    assert [reloading in text for text in told] == [True, True]
    assert reloading not in page.read_text("utf-8")


def test_an_interrupt_leaves_a_page_that_rests(tmp_path, monkeypatch):
    run, page = write_run(tmp_path / "run", sites=1), tmp_path / "page.html"
    monkeypatch.setattr("outergrad.tools.commands.report.time.sleep", interrupted)
    result = report(run, "--live", "-o", page)
    assert result.exit_code == 0
    assert "refresh" not in page.read_text("utf-8").partition("<body>")[0]


def interrupted(seconds):
    raise KeyboardInterrupt


def test_the_page_tells_what_was_tried(tmp_path):
    run = write_run(tmp_path / "run", sites=2, steps=20)
    about = {"methods": ("DAD()", "<b>"), "seconds": 0.012, "kept_seconds": 0.008}
    for rank in range(2):
        trial = Trial(rank=rank, step=15, time=1.7e9, **about, outcome="slower")
        with (run / f"site-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line_of(trial)) + "\n")
    assert list(load(run).trials["outcome"]) == ["slower"] * 2
    text = write_page([run], tmp_path / "page.html").path.read_text("utf-8")
    assert "<li>step 15: DAD() / &lt;b&gt;, slower: 12 ms against 8 ms</li>" in text


def test_series_are_means_over_sites(tmp_path):
    (run,) = data_of(page_of(tmp_path, "whole"))
    layers = run["layers"]
    assert layers["names"] == list(TRAVELS)
    assert layers["step"] == list(range(0, 200, 10))
    assert layers["travels"] == list(TRAVELS.values())
    assert layers["cosine"][0][0] == pytest.approx((0.75 + 0.5) / 2)
    assert layers["cosine_by_site"]["1"][0][0] == pytest.approx(0.5)
    assert len(run["spectra"]["values"][0][-1]) == 16
    loss = run["scalars"]["loss"]
    assert (loss["low"][0], loss["high"][0]) == (2.3, 2.31)
    assert run["time"]["mean"]["rest_s"] == pytest.approx(0.0906)


def test_the_table_and_the_bar_tell_the_same_time(tmp_path):
    """Also of older records, whose parts may be of a step that waited longer than the mean."""
    folder = write_run(tmp_path / "run")
    for file in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for k, line in enumerate(lines):
            if line["event"] == "step" and line["seconds"]:
                line.update(seconds=0.02 + 0.001 * k, wait_s=0.2 if k % 3 else 0.0)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recording = load(folder)
    mean = series(recording)["time"]["mean"]
    assert sum(mean.values()) == pytest.approx(summary(recording).step_s, rel=1e-3)
    split = time_split(recording.steps)
    parts = split[["compress_s", "replay_s", "wait_s", "rest_s"]]
    assert (parts >= 0).all(axis=None)
    assert parts.sum(axis="columns").tolist() == pytest.approx(split["seconds"].tolist())


def test_bytes_of_ddp_are_shared_out_by_parameters(tmp_path):
    (run,) = data_of(page_of(tmp_path, "whole"))
    dense = run["layers"]["dense_bytes"]
    assert sum(dense) == pytest.approx(DENSE_BYTES, rel=1e-3)
    assert dense[0] == pytest.approx(4 * 64 * 33, rel=1e-3)


def test_bytes_and_time_of_what_was_logged_grow(tmp_path):
    (run,) = data_of(page_of(tmp_path, "whole"))
    for axis in ("step", "bytes", "seconds"):
        values = run["scalars"]["loss"][axis]
        assert values == sorted(values)
        assert values[-1] > values[0]


def test_bytes_of_a_process_that_goes_on_are_added(tmp_path):
    file = write_run(tmp_path / "run", sites=1, steps=40) / "site-0.jsonl"
    first = list(map(json.loads, file.read_text().splitlines()))
    again = [entry | {"step": entry["step"] + 40} for entry in first]
    file.write_text("\n".join(map(json.dumps, first + again)) + "\n")
    page = tmp_path / "page.html"
    assert report(file.parent, "-o", page).exit_code == 0
    (run,) = data_of(page)
    sent = run["scalars"]["loss"]["bytes"]
    assert sent == sorted(sent)
    assert sent[-1] == pytest.approx(2 * 30_000 + 9_000 * (31 + 31))


def test_long_runs_are_thinned_and_keep_their_ends(tmp_path):
    page = tmp_path / "page.html"
    report(write_run(tmp_path / "long", steps=1500, every=1), "-o", page)
    (run,) = data_of(page)
    for steps in (run["layers"]["step"], run["spectra"]["step"]):
        assert (steps[0], steps[-1]) == (0, 1499)
    assert len(run["layers"]["step"]) == len(run["bytes"]["step"]) == 200
    assert len(run["scalars"]["loss"]["step"]) == 200
    assert run["scalars"]["loss"]["step"][-1] == 1500


@pytest.mark.parametrize("count", [1, 2, 199, 200, 201, 5000])
def test_thinning_keeps_both_ends_and_the_order(count):
    kept = thin(list(range(count)), 200)
    assert len(kept) == min(count, 200)
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert kept == sorted(set(kept))


def test_what_a_run_says_of_itself_is_text(tmp_path):
    text = page_of(tmp_path, "wild").read_text("utf-8")
    assert "<script>alert" not in text
    assert "<b>" not in text[: text.index("<script>")]


def test_the_command_says_last_where_the_page_lies(tmp_path):
    page = tmp_path / "page.html"
    result = report(write_run(tmp_path / "a"), "-o", page)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"{page} ({page.stat().st_size / 1e6:.3g} MB)"
    assert not result.stderr


def test_without_o_the_page_is_report_html(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"))
    assert report("a").exit_code == 0
    assert Path("report.html").stat().st_size < 6e6


def test_what_was_wrong_is_on_the_page_and_on_the_terminal(tmp_path):
    whole, cut = write_run(tmp_path / "whole"), write_bare(tmp_path / "cut")
    with (cut / "site-0.jsonl").open("a") as file:
        file.write('{"event": "lay')
    page = tmp_path / "page.html"
    result = report(whole, cut, tmp_path / "none", "-o", page)
    assert result.exit_code == 0
    first, second = result.stderr.splitlines()
    assert first.startswith("outergrad: cut: site-0.jsonl, line ")
    assert "cut off" in first
    assert second == f"outergrad: {tmp_path / 'none'}: No such file or directory"
    text = page.read_text("utf-8")
    assert first.removeprefix("outergrad: ") in text
    assert [run["name"] for run in data_of(page)] == ["whole", "cut"]


MISTAKES = {
    "no such run": (["none", "-o", "page.html"], "none: No such file or directory"),
    "two of them": (["none", "never"], "none: No such file or directory; never: No such file"),
    "no page": (["run", "-o", "no/page.html"], "-o no/page.html: No such file or directory"),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"))
    result = report(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"outergrad: {said}")
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_a_page_that_does_not_fit_leaves_the_one_before(tmp_path):
    run, page = write_run(tmp_path / "run"), tmp_path / "pages" / "page.html"
    page.parent.mkdir()
    page.write_text("before")
    with longest_file(65536):
        result = report(run, "-o", page)
    assert result.exit_code == 2
    assert result.stderr == f"outergrad: -o {page}: File too large\n"
    assert page.read_text() == "before"
    assert [*page.parent.iterdir()] == [page]


def test_without_the_packages_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("outergrad.core.packages.is_installed", lambda name: False)
    result = report(write_run(tmp_path / "a"))
    assert result.exit_code == 2
    told = "pandas, plotly not found: pip install 'pandas>=2.2' 'plotly>=6.0'"
    assert result.stderr == f"outergrad: {told}\n"


def test_names_are_as_short_as_tells_runs_apart():
    assert names([Path("/x/runs/a"), Path("/x/runs/b")]) == ["a", "b"]
    assert names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]
    assert names([Path("/x/run/site-0.jsonl")]) == ["run/site-0"]
    assert names([Path("/x/a/site-0.jsonl"), Path("/x/b/site-0.jsonl")]) == ["a/site-0", "b/site-0"]
    assert names([Path("/x/run-0.5"), Path("/x/run-0.9")]) == ["run-0.5", "run-0.9"]


def test_what_was_not_recorded_is_a_dash(tmp_path):
    text = page_of(tmp_path, "run alone").read_text("utf-8")
    for head in ("Sent per step", "Fewer bytes than DDP", "Time per step"):
        assert f'<td data-head="{head}">\N{EN DASH}</td>' in text
