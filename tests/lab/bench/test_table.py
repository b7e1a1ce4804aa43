"""A table shows every figure whole in a terminal of 80 columns."""

from __future__ import annotations

import pytest
from made_up import arrival, link, results, timing
from rich.console import Console

from outergrad_lab.bench.plan import COMPARED
from outergrad_lab.bench.table import arrival_rows, phases_lines, table, timing_rows, title


def shown(found, width=80):
    """The lines of the table of the first link."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table(found, found.links[0]))
    return capture.get().splitlines()


def slowest(method, **changes):
    """As long as any figure gets: 8 kbit/s and a large model."""
    usual = {
        "median_s": 123.4567,
        "quartiles_s": (99.876, 123.987),
        "ratio_to_ddp": 123.4567,
        "sent_bytes": 999.9e6,
    }
    return timing(method, **usual | changes)


TIMED = {
    "slow": [slowest(method) for method in COMPARED],
    "fast": [timing(method, 1e-3, ratio_to_ddp=0.0001) for method in COMPARED],
    "just under a second": [timing(m, median_s=0.9999, sent_bytes=1.0) for m in COMPARED],
    "without ddp": [timing("dad", ratio_to_ddp=None)],
    "one": [timing("alone")],
}
ARRIVED = {
    "reached": [arrival(method) for method in COMPARED],
    "missed": [arrival(method, [0.9] * 5000, reached=False) for method in COMPARED],
    "diverged": [arrival(method, [float("nan")], reached=False) for method in COMPARED],
    "without ddp": [arrival("dad")],
}


def assert_whole(lines, rows):
    """Every cell of every row is there."""
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "…" not in text
    for row in rows:
        (line,) = [line for line in lines if line.split()[:1] == [row["method"]]]
        assert " ".join(line.split()) == " ".join(row.values())


@pytest.mark.parametrize("timings", TIMED.values(), ids=TIMED)
def test_step_times_fit(timings):
    found = link(timings=timings)
    assert_whole(shown(results(found)), timing_rows(found))


@pytest.mark.parametrize("arrivals", ARRIVED.values(), ids=ARRIVED)
def test_ways_to_a_loss_fit(arrivals):
    found = link(arrivals=arrivals)
    assert_whole(shown(results(found, until_loss=0.5)), arrival_rows(found))


def test_bytes_and_times_are_compared_with_ddp():
    ddp = timing("ddp", 1.0, ratio_to_ddp=1.0, sent_bytes=1e6)
    dad = timing("dad", ratio_to_ddp=0.25, sent_bytes=1e5)
    alone = timing("alone", ratio_to_ddp=0.125)
    rows = timing_rows(link(timings=[ddp, dad, alone]))
    assert [(row["method"], row["x DDP"], row["fewer\nbytes"]) for row in rows] == [
        ("ddp", "1.000", "1.0 x"),
        ("dad", "0.250", "10.0 x"),
        ("alone", "0.125", "-"),
    ]


def test_without_ddp_nothing_is_compared():
    (row,) = timing_rows(link(timings=[timing("dad", ratio_to_ddp=None)]))
    assert row["x DDP"] == row["fewer\nbytes"] == "-"


@pytest.mark.parametrize(("ddp_arrives", "dad_arrives"), [(True, False), (False, True)])
def test_only_arrivals_are_compared(ddp_arrives, dad_arrives):
    ddp, dad = arrival("ddp", reached=ddp_arrives), arrival("dad", reached=dad_arrives)
    rows = arrival_rows(link(arrivals=[ddp, dad]))
    missed = ["missed" in row["test loss"] for row in rows]
    assert missed == [not ddp_arrives, not dad_arrives]
    assert rows[1]["x DDP"] == rows[1]["fewer\nbytes"] == "-"


def test_the_title_says_what_was_asked_and_what_was_measured():
    text = title(results(sites=4), link("100mbit"))
    assert text.startswith("mlp, 4 sites, data mnist, link 100mbit (measured: 95.0 Mbit/s, 0.2 ms")
    assert title(results(), link("100mbit", probe=None)).endswith("link 100mbit")


def test_loopback_is_plainly_marked_as_unshaped():
    assert "UNSHAPED" in title(results(), link("loopback"))
    assert "UNSHAPED" not in title(results(), link("none"))


def test_phases_are_told_in_ms_one_line_per_method():
    timings = [timing(m, phases_s={"forward_s": 0.001, "wait_s": 1.5}) for m in ("ddp", "dad")]
    wanted = ["  ddp: forward 1.0, wait 1500.0", "  dad: forward 1.0, wait 1500.0"]
    assert phases_lines(timings).splitlines() == wanted


def test_a_long_name_takes_lines_and_no_figure_is_cut():
    name = "rank-dad:budget=1/80:wire=int4:vectors=int4:error_feedback=auto:reduce=gather"
    found = link(timings=[slowest(name)])
    lines = shown(results(found))
    ((folded, *figures),) = [row.values() for row in timing_rows(found)]
    assert all(any(figure in line for line in lines) for figure in figures)
    assert "".join(line.split()[0] for line in lines[-8:] if line.strip()).endswith(folded)
