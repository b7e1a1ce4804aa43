"""Report of a diagnosis in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outergrad._amounts import many, seconds, times
from outergrad._printable import printable
from outergrad.tools.doctor.course import Diagnosis
from outergrad.tools.doctor.findings import Finding, Level
from outergrad.tools.doctor.links import Measured, rate

_LINE = "\n"
_MARKS = {
    Level.OK: ("✓", "+", "green"),
    Level.NOTE: ("•", "-", "cyan"),
    Level.WARNING: ("!", "!", "yellow"),
    Level.PROBLEM: ("✗", "x", "bold red"),
}
"""Symbol, its ASCII substitute, and style of each level."""


def show(console: Console, report: Diagnosis, closing: str = "") -> None:
    """Prints a report: sections, tables, the verdict, and `closing` if there is no problem."""
    plain = not console.encoding.lower().startswith("utf")
    for title, findings in report.sections.items():
        console.print(Text(title, style="bold"))
        parts = [_lines(findings, plain)]
        if title == "Between the sites":
            parts.insert(0, _sites(report))
        if title == "Links" and any(link.rates for link in report.links):
            parts.insert(0, _links(report.links))
        for part in parts:
            console.print(Padding(part, (0, 0, 1, 2)))
    console.print(_verdict(report.findings))
    if closing and not report.exit_code:
        console.print(closing, highlight=False, markup=False)


def _lines(findings: Sequence[Finding], plain: bool) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True, min_width=12)
    grid.add_column()
    for finding in findings:
        symbol, ascii_symbol, style = _MARKS[finding.level]
        text = Text(printable(finding.said, keep=_LINE))
        if finding.remedy:
            urgent = finding.level >= Level.WARNING
            remedy = f"\n{'->' if plain else '→'} {printable(finding.remedy, keep=_LINE)}"
            text.append(remedy, style="bold" if urgent else "dim")
        mark = f"{ascii_symbol if plain else symbol} {finding.level.name.lower()}"
        grid.add_row(Text(mark, style=style), finding.what, text)
    return grid


def _sites(report: Diagnosis) -> Table:
    rows = {rank: (str(rank), "did not come", "", "") for rank in report.roll.missing}
    for site in report.roll.sites:
        clock = str(report.offsets.get(site.rank) or "not measured") if site.rank else "reference"
        listens = f"{site.address} ({site.interface})"
        rows[site.rank] = (str(site.rank), site.host, listens, clock)
    table = _table("site", "machine", "gloo listens at", "clock ahead by")
    for rank in sorted(rows):
        table.add_row(*rows[rank])
    return table


def _links(links: Sequence[Measured]) -> Table:
    table = _table("from", "to", "there and back", "one way at a time", "both ways at once")
    for column in table.columns[2:]:
        column.justify = "right"
    for link in links:
        pair, rates = (f"site {link.lower}", f"site {link.higher}"), link.rates
        if rates:
            table.add_row(*pair, seconds(link.rtt_s, times), rate(rates.alone), rate(rates.both))
            table.add_row(*pair[::-1], "", rate(rates.alone_back), rate(rates.both_back))
        else:
            table.add_row(*pair, "-", "not measured", "-")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _verdict(findings: Sequence[Finding]) -> Text:
    problems = [finding.what for finding in findings if finding.level == Level.PROBLEM]
    warnings = sum(finding.level == Level.WARNING for finding in findings)
    if problems:
        count = many(len(problems), "problem")
        count += f" and {many(warnings, 'warning')}" if warnings else ""
        names = ", ".join(dict.fromkeys(problems))
        said, style = f"{count}: mend {names} as said above, then look again.", "bold red"
    elif warnings:
        said = f"no problem, {many(warnings, 'warning')}: training will run; read the above."
        style = "bold yellow"
    else:
        said, style = "all is well.", "bold green"
    return Text(f"VERDICT: {said}", style=style)
