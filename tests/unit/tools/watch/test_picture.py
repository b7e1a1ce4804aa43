"""The picture, as text."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from made_up_watch import drawn, view
from rich.console import Console

from made_up_run import START, events, layer, watched
from outergrad._printable import printable
from outergrad.core.run_figures import Watched
from outergrad.events import End, Exchange, Layer, Mishap, Run, Scalars, Step, Trial
from outergrad.tools.watch.live import summary_line
from outergrad.tools.watch.picture import picture


def test_at_80_by_24():
    lines = drawn(watched(sites=2), foreign=0)
    assert lines[0].split() == ["runs/mlp", "RankDAD(rank=4)", "●", "live"]
    text = "\n".join(lines)
    for said in (
        "step     200 · 10.0 per second · 100 ms · 19 s · 6.92 k parameters shared",
        "sent     9 kB per step · 90 kB/s · 1.75 MB in all · 3.1\u00d7 fewer than DDP",
        "░ the rest 91%",
        "● ●  agree 0.93 (site 1) to 0.96",
        "noise    as much as signal in 2.5 batches of a site",
        "samples  5.9\u00d7 the median, in encoder.2.weight: 7 of site 1",
        "layer               travels   rows→kept     sent  rank           cosine  error",
        "encoder.0           low rank       32→4  1.54 kB",
        "head                dense             -  5.12 kB",
    ):
        assert said in text
    assert re.search(r"loss     0\.1962 +█", text)
    assert re.search(r"accuracy 0\.9169 +█", text)


def many_layers(count: int) -> Watched:
    run = watched(sites=2)
    for i in range(count):
        name = f"transformer.blocks.{i}.attention.projection.weight"
        some = replace(layer(0, 2, 190, "encoder.0.weight"), layer=name, sent_bytes=10 + i)
        run.take(some, heard=START + 20)
    return run


@pytest.mark.parametrize("layers", [0, 1, 40])
@pytest.mark.parametrize("scalars", [0, 1, 9])
@pytest.mark.parametrize(
    ("width", "height"),
    [(80, 24), (140, 45), (200, 60), (100, 30), (60, 16), (40, 10), (20, 5), (10, 2), (80, None)],
)
def test_it_fits_every_terminal(width, height, layers, scalars):
    run = many_layers(layers)
    values = {f"a scalar with a long name {i}": math.nan for i in range(scalars)}
    run.take(Scalars(rank=0, step=200, time=START + 20, values=values), heard=START + 20)
    out = io.StringIO()
    console = Console(file=out, width=width, height=height or 500, force_terminal=True)
    text = picture(run, view(width, height))
    assert all(len(line) <= width for line in text.plain.split("\n"))
    console.print(text, no_wrap=True, crop=False)
    assert out.getvalue().count("\n") <= (height or 1000)


def test_what_does_not_fit_is_counted():
    lines = drawn(many_layers(40))
    assert len(lines) == 24
    shown = sum("low rank" in line or "factors" in line or "dense" in line for line in lines)
    assert f" and {43 - shown} more" in lines
    assert "head" in lines[lines.index(next(x for x in lines if "travels" in x)) + 1]


def test_everything_is_there_without_a_terminal():
    text = "\n".join(drawn(many_layers(40), height=None))
    assert "more" not in text
    assert text.count("low rank") == 41


def test_long_names_lose_the_modules_around():
    text = "\n".join(drawn(many_layers(3)))
    assert " …2.attention.proj" not in text
    assert " …projection " in text
    wide = "\n".join(drawn(many_layers(3), width=160))
    assert " transformer.blocks.2.attention.projection " in wide


def test_a_wide_terminal_shows_more():
    heading = next(line for line in drawn(watched(), width=140, height=45) if "travels" in line)
    assert {"received", "compress", "wait", "spectrum"} <= {*heading.split()}


def test_curves_grow_where_there_is_room():
    for height, rows in ((14, 1), (18, 4), (60, 8)):
        lines = drawn(watched(), height=height)
        above = next(i for i, line in enumerate(lines) if line.startswith(" loss"))
        below = next(i for i, line in enumerate(lines) if line.startswith(" sent"))
        assert below - above == rows


def test_scalars_without_room_are_counted():
    run = watched()
    values = {f"metric {i}": float(i) for i in range(5)}
    run.take(Scalars(rank=0, step=200, time=START + 20, values=values), heard=START + 20)
    lines = drawn(run)
    assert "and 3 more scalars" in lines[-1]
    assert sum("metric" in line for line in lines) == 1
    assert "\n".join(drawn(run, height=None)).count("metric") == 5


def test_silence_of_all():
    lines = drawn(watched(), later_s=40.0)
    assert lines[0].endswith("○ no news for 40 s")
    assert "silent:" not in "\n".join(lines)


def test_a_silent_site_is_named():
    text = "\n".join(drawn(watched(sites=3, silent={1: 100}), later_s=2.0))
    assert "● live" in text
    assert "● ○ ●" in text
    assert "silent: site 1 for 12 s, at step 100" in text


def test_the_site_that_was_silent_first_is_named():
    text = "\n".join(drawn(watched(sites=3, silent={1: 100}), later_s=60.0))
    assert "no news for 1m 00s" in text
    assert "silent: site 1 for 1m 10s, at step 100" in text


def test_sites_that_write_elsewhere_are_counted():
    run = Watched()
    for event in events(1, 4, 100, 10, START):
        run.take(event, heard=START + 10)
    assert "· ● · ·  1 of 4 write here" in "\n".join(drawn(run, steps=100))


def test_many_sites():
    text = "\n".join(drawn(watched(sites=40, steps=30), steps=30))
    assert "● " * 15 + "●  40  agree" in text


def test_foreign_lines_are_counted():
    assert "1 line that is no event " in drawn(watched(), foreign=1)[-1]
    assert "1,200 lines that are no events" in drawn(watched(), foreign=1200)[-1]


def test_a_training_that_goes_on():
    run = watched(sites=1)
    begun = run.run
    assert begun is not None
    run.take(replace(begun, step=200, time=START + 500), heard=START + 500)
    last = Scalars(rank=0, step=260, time=START + 530, values={"loss": math.nan})
    run.take(last, heard=START + 530)
    text = "\n".join(drawn(run, later_s=511.0))
    assert "30 s since step 200" in text
    assert "loss     nan" in text


def test_nothing_yet():
    (line,) = drawn(Watched())
    assert line == " waiting for site-*.jsonl in runs/mlp"


def test_before_the_first_step():
    run = Watched()
    run.take(events(0, 2, 1, 10, START)[0], heard=START)
    text = "\n".join(drawn(run, steps=0))
    assert "nothing recorded yet" in text


def test_after_the_first_step_times_are_seconds():
    run = Watched()
    for event in events(0, 1, 1, 10, START):
        run.take(event, heard=START)
    assert "wait 9 ms" in "\n".join(drawn(run, steps=0))


def test_layers_alone():
    """As in the last part of a large file."""
    run = Watched()
    for event in events(0, 1, 1, 10, START):
        if isinstance(event, Layer):
            run.take(event, heard=START)
    text = "\n".join(drawn(run, steps=0))
    assert "a run of which the beginning was not written" in text
    assert "encoder.2" in text


def test_a_line_for_logs():
    assert summary_line(watched(), view()) == (
        "step 200  loss 0.1962  accuracy 0.9169  10.0 steps/s  9 kB/step  3.1x fewer than DDP"
    )
    quiet = summary_line(watched(), view(later_s=40.0))
    assert re.search(r"  no news since \d\d:\d\d:\d\d$", quiet)
    assert summary_line(watched(), view(later_s=50.0)) == quiet
    assert summary_line(Watched(), view()) == "waiting for site-*.jsonl in runs/mlp"


def test_a_run_that_ended_is_not_called_silent():
    run = watched(sites=2)
    for rank in range(2):
        run.take(End(rank=rank, step=200, time=START + 20), heard=START + 20)
    lines = drawn(run, later_s=4000.0)
    assert lines[0].endswith("■ ended 1h 06m ago")
    assert not any("silent" in line or "no news" in line for line in lines)
    assert summary_line(run, view(later_s=4000.0)).endswith("ended")


def test_an_error_that_ended_a_run_is_named():
    run = watched(sites=2)
    for rank in range(2):
        error = "ValueError" if rank else ""
        run.take(End(rank=rank, step=200, time=START + 20, error=error), heard=START + 20)
    assert drawn(run, later_s=5.0)[0].endswith("■ ended by ValueError 5 s ago")


def test_a_site_that_ended_does_not_hide_that_another_is_silent():
    run = watched(sites=3, silent={1: 100})
    run.take(End(rank=0, step=200, time=START + 20), heard=START + 20)
    lines = drawn(run, later_s=60.0)
    assert "no news" in lines[0]
    assert "silent: site 1 for 1m 10s, at step 100" in "\n".join(lines)


def test_a_run_that_goes_on_has_not_ended():
    run = watched(sites=1)
    run.take(End(rank=0, step=200, time=START + 20), heard=START + 20)
    again = next(e for e in events(0, 1, 1, 10, START) if isinstance(e, Run))
    run.take(replace(again, step=200, time=START + 30), heard=START + 30)
    assert drawn(run, later_s=11.0)[0].endswith("● live")


def trial(**about: Any) -> Trial:
    own = {"rank": 0, "step": 200, "time": START + 20, "seconds": 0.012, "kept_seconds": 0.008}
    return Trial(**own, **about)


def test_the_last_trial_is_told():
    run = watched(sites=1)
    run.take(trial(methods=("DAD()", "DAD()"), outcome="slower"), heard=START + 20)
    line = next(line for line in drawn(run) if line.startswith(" trial"))
    assert "DAD(): slower" in line
    assert "12 ms against 8 ms" in line


@pytest.mark.parametrize("late", [(), ("hospital-c",)])
def test_the_last_exchange_with_a_quorum_says_who_was_late(late):
    run = watched(sites=2)
    there = tuple(name for name in ("hospital-a", "hospital-b", "hospital-c") if name not in late)
    for rank in range(2):
        about = {"rank": rank, "step": 200, "time": START + 20, "took_part": there, "late": late}
        run.take(Exchange(**about, number=7), heard=START + 20)
    line = next(line for line in drawn(run) if line.startswith(" exchange"))
    assert f"7: {', '.join(there)}" in line
    assert ("without hospital-c, which was late" in line) == bool(late)


def test_nothing_of_a_file_steers_the_terminal():
    """Names of scalars, layers and what was waited for come from a file."""
    evil = "loss\x1b]0;owned\x07\x1b[2J\n\u202e\x9b1m"
    run = watched(sites=1)
    own = {"rank": 0, "step": 200, "time": START + 20}
    run.take(Scalars(**own, values={evil: 1.0}), heard=START + 20)
    run.take(Mishap(**own, what=evil, sites=(0,), layer=evil), heard=START + 20)
    run.take(trial(methods=(evil,), outcome=evil), heard=START + 20)
    run.take(Exchange(**own, number=1, took_part=(evil,), late=(evil,)), heard=START + 20)
    run.take(replace(layer(0, 1, 200, "head.weight"), layer=evil, travels=evil), heard=START + 20)
    run.take(replace(run.run, method=evil, step=200), heard=START + 20)
    shown = [*drawn(run, height=None, width=200), summary_line(run, view())]
    assert any("loss\N{REPLACEMENT CHARACTER}" in line for line in shown)
    for line in shown:
        assert printable(line) == line


def test_shares_of_old_records_are_not_more_than_a_step():
    """They have the wait of one step beside the mean of several."""
    run = Watched()
    for event in events(0, 1, 100, 10, START):
        event = replace(event, wait_s=0.15) if isinstance(event, Step) else event
        run.take(event, heard=START)
    line = next(line for line in drawn(run) if line.startswith(" time"))
    assert "wait 100%" in line
