from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console

from forked import forked_processes
from outergrad.launch.start import run_sites
from outergrad_lab.demo import JOB, LINK, Outcome, conclusions, demo, table, verdict


def outcomes(**changes) -> dict[str, Outcome]:
    """Outcomes of all methods, alike but for what a test changes."""
    usual = Outcome(
        accuracy=0.9,
        losses=torch.tensor([2.0, 0.5]),
        sent_bytes=0.0,
        measured=True,
        seconds=1.0,
    )
    sent = {"dense": 1000.0, "ddp": 1000.0, "dad": 100.0, "auto": 100.0}
    methods = ("pooled", "alone", "dense", "ddp", "dad", "auto")
    usually = {method: replace(usual, sent_bytes=sent.get(method, 0.0)) for method in methods}
    return usually | changes


def text(of: dict[str, Outcome], link: str = "loopback") -> str:
    """The table on a screen of 80 columns."""
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(JOB, of, link))
    return capture.get()


def test_the_table_has_a_row_for_each_method_and_fits_the_screen():
    lines = text(outcomes()).splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["pooled", "alone", "dense", "PyTorch", "dAD", "the"]
    assert "90.0%" in rows[-1]
    assert "0.100" in rows[-1]
    assert "kB per step" in text(outcomes())


def test_computed_bytes_are_said_to_be():
    some = replace(outcomes()["dad"], measured=False)
    assert "computed" in text(outcomes(dad=some))
    assert "computed" not in text(outcomes())


def test_only_equal_losses_are_called_equal():
    off = replace(outcomes()["dad"], losses=torch.tensor([2.0, 0.6]))
    assert "dAD equals pooled" in conclusions(outcomes())
    assert "dAD differs from pooled" in conclusions(outcomes(dad=off))
    assert "further apart than 1e-01" in conclusions(outcomes(dad=off))


def test_the_default_is_compared_with_ddp():
    slower = replace(outcomes()["auto"], seconds=1.5)
    assert "take 1.50 times as long as DDP's" in conclusions(outcomes(auto=slower))
    assert "1.50" in text(outcomes(auto=slower), LINK)


def test_bytes_of_strangers_are_mentioned():
    disturbed = replace(outcomes()["alone"], sent_bytes=50.0)
    assert "Other programs" in conclusions(outcomes(alone=disturbed))
    assert "Other programs" not in conclusions(outcomes())


def test_seconds_are_those_of_a_slow_link_measured_or_planned():
    sent = 1.25e6  # a tenth of a second at 100 Mbit/s, in each of two steps
    found = outcomes(ddp=replace(outcomes()["ddp"], sent_bytes=sent, seconds=3.0))
    assert "planned" not in text(found, LINK)
    assert "planned" in text(found)
    assert found["ddp"].on_link_s(LINK) == 3.0
    assert found["ddp"].on_link_s("loopback") == pytest.approx(3.2)
    assert "Planned seconds" in conclusions(found)
    assert "Planned seconds" not in conclusions(found, LINK)


def test_the_verdict_is_one_sentence_that_follows_from_the_table():
    faster = outcomes(dad=replace(outcomes()["dad"], sent_bytes=100.0, seconds=0.25))
    said = verdict(faster, LINK)
    assert "4.0 times as fast as DDP, with 10 times fewer bytes, to 90%" in said
    assert said.count(".") - said.count(".0") == 1


@pytest.mark.slow
def test_two_sites_run_the_demo(tmp_path):
    with forked_processes(tmp_path / "shown"):
        run_sites(partial(demo, replace(JOB, epochs=3), tmp_path), 2)
    shown = (tmp_path / "shown").read_text()
    assert "dAD equals pooled" in shown
    assert shown.count("│") == 6 * 7
    assert str(tmp_path / "report.html") in shown.splitlines()[-2]
    assert "exact factors train" in shown.splitlines()[-1]
    assert (tmp_path / "report.html").stat().st_size > 1e6
