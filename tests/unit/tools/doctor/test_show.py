from __future__ import annotations

import io

import pytest
from made_up_sites import site
from rich.console import Console

from outergrad.tools.doctor.course import Diagnosis, show
from outergrad.tools.doctor.findings import note, ok, problem, warning
from outergrad.tools.doctor.links import Measured
from outergrad.tools.doctor.meeting import Offset, Roll


def shown(report: Diagnosis, width: int = 80, encoding: str = "utf-8") -> str:
    """What a terminal of that width and encoding would get."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(Console(file=file, width=width), report, "what next")
    file.flush()
    return file.buffer.getvalue().decode(encoding)


ALL = [ok("a", "fine"), note("b", "so"), warning("c", "hm", "do"), problem("d", "bad", "mend")]


@pytest.mark.parametrize(
    ("findings", "verdict", "code"),
    [
        (ALL[:2], "VERDICT: all is well.", 0),
        (ALL[:3], "VERDICT: no problem, 1 warning: training will run", 0),
        (ALL, "VERDICT: 1 problem and 1 warning: mend d as said above, then look again.", 1),
    ],
)
def test_the_verdict_comes_last(findings, verdict, code):
    report = Diagnosis({"This machine": findings})
    assert report.exit_code == code
    lines = shown(report).rstrip().splitlines()
    assert any(line.startswith(verdict) for line in lines)
    assert (lines[-1] == "what next") == (code == 0)


def test_each_finding_has_a_mark_a_word_and_a_remedy():
    text = shown(Diagnosis({"This machine": ALL}))
    for mark in ("✓ ok", "• note", "! warning", "✗ problem", "→ mend"):
        assert mark in text


def test_a_terminal_without_unicode_gets_ascii():
    text = shown(Diagnosis({"This machine": ALL}), encoding="ascii")
    assert "x problem" in text
    assert "-> mend" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit(width):
    report = Diagnosis(
        {"Between the sites": ALL[:1], "Links": ALL[:1]},
        Roll([site(0, 3), site(2, 3)], missing=[1]),
        {2: Offset(-0.0012, 0.0203)},
        [Measured(0, 2, 0.04, 96e6, 955e3, 9.6e6, 1.2e9), Measured(0, 1)],
    )
    text = shown(report, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for words in ("10.0.0.3 (eth0)", "-1.2 ms ± 20.3 ms", "955 kbit/s", "1.2 Gbit/s", "40 ms"):
        assert words in text
    assert "did not come" in text
    assert "not measured" in text


def test_what_other_sites_say_does_not_steer_the_terminal():
    from outergrad.tools.doctor.course import _lines
    from outergrad.tools.doctor.findings import Finding, Level

    finding = Finding(Level.PROBLEM, "x", "a\x1b[31mb", "c\x9bd")
    shown = [str(cell) for column in _lines([finding], True).columns for cell in column.cells]
    assert not any("\x1b" in cell or "\x9b" in cell for cell in shown)
