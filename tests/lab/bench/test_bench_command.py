"""``outergrad bench`` as a user meets it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
from made_up import link, results, timing
from typer.testing import CliRunner

from outergrad.launch.links import ShapedLink, parse_link, what_is_missing
from outergrad.tools.commands.app import app
from outergrad_lab.bench.plan import COMPARED
from outergrad_lab.bench.table import PAIRING
from outergrad_lab.workloads import WORKLOADS

command = import_module("outergrad_lab.commands.bench")  # the package's own name is the function
MISSING = what_is_missing(ShapedLink(rate_bit_per_s=1e8), 3)
shaped = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
LOOPBACK = ["--link", "loopback"]
MISTAKES = {
    "workload": (["--workload", "chess"], "--model must be one of mlp, deep-mlp"),
    "rows": (["--rows", "0"], "--rows must be 1 or more, not 0"),
    "rows of one's own": (["--model", "mine:make"], "--model mine:make needs --rows"),
    "loss of one's own": (
        ["--model", "mine:make", "--rows", "4", "--until-loss", "1"],
        "--until-loss needs real data; mine:make has none",
    ),
    "method": (["--methods", "ddp,magic"], "--methods must be one of pooled, alone, ddp"),
    "pooled": (["--methods", "pooled"], "pooled exchanges nothing"),
    "method twice": (["--methods", "ddp, ddp"], "--methods must name each method once"),
    "one site": (["--sites", "1"], "--sites must be 2 or more, not 1"),
    "no steps": (["--steps", "0"], "--steps must be 1 or more, not 0"),
    "no time": (["--seconds", "0"], "--seconds must be above 0"),
    "short warmup": (["--warmup", "1"], "--warmup must be 3 or more"),
    "no loss": (["--until-loss", "0"], "--until-loss must be above 0"),
    "no data": (["--workload", "vgg", "--until-loss", "1"], "--until-loss needs real data"),
    "nothing to check": (["--until-loss", "1", "--check"], "leave out --until-loss"),
    "link": (["--link", "fast"], "such as 10mbit"),
    "one bad link of two": (["--link", "loopback,1bit"], "--link '1bit' cannot be read"),
    "impossible rate": (["--link", "1kbit"], "a rate from 8kbit to 100gbit"),
    "rtt": (["--rtt", "40"], "--latency '40' cannot be read"),
    "rtt on loopback": ([*LOOPBACK, "--rtt", "40ms"], "leave out --latency"),
    "folder": ([*LOOPBACK, "--out", os.devnull], "--out /dev/null: File exists"),
}


def invoke(*args: str):
    return CliRunner().invoke(app, ["bench", *args])


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(args, said):
    result = invoke(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("outergrad: --")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_a_model_that_cannot_be_made_is_one_line():
    result = invoke("--model", "nowhere:make", "--rows", "4", *LOOPBACK)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--model nowhere:make: cannot import 'nowhere'" in result.stderr


def test_help_names_every_choice():
    text = " ".join(invoke("--help").stdout.replace("│", " ").split())
    assert all(name in text for name in (*WORKLOADS, *COMPARED, "10mbit", "loopback", "40ms"))


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Stands in for the measurement; keeps how it was asked for."""
    asked = {}

    def run(plan, links, words, done, *, verbose):
        asked.update(plan=plan, links=links, words=words)
        claims = timing("dad", claimed_bytes=asked.get("claimed_bytes", 950_000.0))
        found = results(link("loopback", timings=[timing("ddp"), claims]))
        done(found, found.links[0])
        return found

    monkeypatch.setattr(command, "run_bench", run)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.fixture
def not_root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def no_iproute2(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)


LACKS = [("not_root", "needs root: run as root,"), ("no_iproute2", "needs `ip`: install iproute2,")]


@pytest.mark.parametrize(("lack", "said"), LACKS)
@pytest.mark.parametrize("args", [["--link", "10mbit"], ["--link", "none"], ["--rtt", "40ms"]])
def test_what_is_missing_for_a_link_is_told_with_a_way_out(request, measured, lack, said, args):
    request.getfixturevalue(lack)
    result = invoke(*args)
    assert result.exit_code == 2
    assert f"{said} or use --link loopback\n" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not measured


@pytest.mark.parametrize(("lack", "said"), LACKS)
def test_the_usual_link_gives_way_to_loopback_and_that_is_said(request, measured, lack, said):
    request.getfixturevalue(lack)
    result = invoke()
    assert result.exit_code == 0
    assert result.stderr.startswith(f"outergrad: --link 100mbit {said}")
    assert result.stderr.endswith("going on unshaped\n")
    assert measured["links"] == [parse_link("loopback")]
    assert "UNSHAPED" in result.stdout
    assert PAIRING in " ".join(result.stdout.split())


@shaped
def test_with_root_the_usual_link_is_shaped(measured):
    assert invoke("--sites", "2").exit_code == 0
    assert [one.name for one in measured["links"]] == ["100mbit"]


def test_what_was_asked_for_is_done(measured, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/opt/bin/outergrad", "bench", "..."])
    args = ["--methods", "ddp, dad", "--sites", "8", "--until-loss", "0.5", "--max-steps", "9"]
    assert invoke(*LOOPBACK, *args).exit_code == 0
    plan = measured["plan"]
    assert (plan.methods, plan.sites, plan.max_steps) == (("ddp", "dad"), 8, 9)
    assert (plan.until_loss, plan.seconds) == (0.5, 900)
    assert measured["words"] == ["outergrad", "bench", "..."]
    assert invoke(*LOOPBACK).exit_code == 0
    assert measured["plan"].seconds == 120


def test_results_lie_where_they_are_looked_for(measured, tmp_path):
    result = invoke(*LOOPBACK)
    (path,) = tmp_path.glob("mlp_2-sites_loopback_*.json")
    assert f"results: {path.relative_to(tmp_path)}" in result.stdout
    assert path.with_suffix(".png").exists()


def test_a_wrong_count_is_one_line_and_exit_code_1_and_the_results_are_there(measured, tmp_path):
    measured["claimed_bytes"] = 5.0
    result = invoke(*LOOPBACK, "--check", "--out", "a.json")
    assert result.exit_code == 1
    assert result.stderr == "outergrad: --check: 1 of 1 counts are wrong\n"
    assert "DIFFERS" in result.stdout
    assert json.loads(Path("a.json").read_text())["links"]
