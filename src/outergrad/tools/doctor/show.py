"""The report in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outergrad.tools.doctor.clocks import Offset
from outergrad.tools.doctor.course import Report
from outergrad.tools.doctor.findings import Finding, Level, of_level
from outergrad.tools.doctor.links import rate, seconds
from outergrad.tools.doctor.pairs import Measured
from outergrad.tools.doctor.sites import Site

_SHOWN = {
    Level.OK: ("✓", "+", "ok", "green"),
    Level.NOTE: ("•", "-", "note", "cyan"),
    Level.WARNING: ("!", "!", "warning", "yellow"),
    Level.PROBLEM: ("✗", "x", "problem", "bold red"),
}
"""Symbol, the same in ASCII, word and style."""

_LARGEST_COLUMN = 12


def show(console: Console, report: Report, closing: str = "") -> None:
    """Prints a report: sections, tables, and the verdict.

    Args:
        console: Where.
        report: What.
        closing: What the user may do next, where there is no problem.
    """
    for title, findings in report.sections.items():
        console.print(Text(title, style="bold"))
        if title == "Between the sites":
            console.print(Padding(sites_table(report), (0, 0, 1, 2)))
        if title == "Links" and any(link.rates for link in report.links):
            console.print(Padding(links_table(report.links), (0, 0, 1, 2)))
        console.print(Padding(lines(findings, _plain(console)), (0, 0, 1, 2)))
    console.print(verdict(report.findings))
    if closing and not report.exit_code:
        console.print(closing, highlight=False, markup=False)


def lines(findings: Sequence[Finding], plain: bool = False) -> Table:
    """One line per finding, and what to do below it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True, min_width=_LARGEST_COLUMN)
    grid.add_column()
    for finding in findings:
        symbol, ascii_symbol, word, style = _SHOWN[finding.level]
        text = Text(finding.said)
        if finding.remedy:
            text.append(
                f"\n{'->' if plain else '→'} {finding.remedy}", style=_remedy_style(finding)
            )
        mark = Text(f"{ascii_symbol if plain else symbol} {word}", style=style)
        grid.add_row(mark, finding.what, text)
    return grid


def _remedy_style(finding: Finding) -> str:
    return "bold" if finding.level >= Level.WARNING else "dim"


def _plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def sites_table(report: Report) -> Table:
    """Where each site is."""
    table = _table("site", "machine", "gloo listens at", "clock ahead by")
    rows = {site.rank: _site_row(site, report) for site in report.sites}
    rows |= {rank: (str(rank), "did not come", "", "") for rank in report.missing}
    for rank in sorted(rows):
        table.add_row(*rows[rank])
    return table


def _site_row(site: Site, report: Report) -> tuple[str, ...]:
    clock = "reference" if site.rank == 0 else _clock(report.offsets.get(site.rank))
    return str(site.rank), site.host, f"{site.address} ({site.interface})", clock


def _clock(offset: Offset | None) -> str:
    return str(offset) if offset else "not measured"


def links_table(links: Sequence[Measured]) -> Table:
    """Delay and rates of each pair, a row for each way."""
    table = _table("from", "to", "there and back", "one way at a time", "both ways at once")
    for column in table.columns[2:]:
        column.justify = "right"
    for link in links:
        for row in _rows(link):
            table.add_row(*row)
    return table


def _rows(link: Measured) -> list[tuple[str, ...]]:
    lower, higher, rates = f"site {link.lower}", f"site {link.higher}", link.rates
    if rates is None or link.rtt_s is None:
        return [(lower, higher, "-", "not measured", "-")]
    return [
        (lower, higher, seconds(link.rtt_s), rate(rates.alone), rate(rates.both)),
        (higher, lower, "", rate(rates.alone_back), rate(rates.both_back)),
    ]


def _table(*headings: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def verdict(findings: Sequence[Finding]) -> Text:
    """The last word, in one line."""
    problems = of_level(findings, Level.PROBLEM)
    warnings = of_level(findings, Level.WARNING)
    beside = f" and {_many(len(warnings), 'warning')}" if warnings else ""
    if problems:
        names = ", ".join(dict.fromkeys(finding.what for finding in problems))
        count = f"{_many(len(problems), 'problem')}{beside}"
        said = f"{count}: mend {names} as said above, then look again."
        return Text(f"VERDICT: {said}", style="bold red")
    if warnings:
        said = f"no problem, {_many(len(warnings), 'warning')}: training will run; read the above."
        return Text(f"VERDICT: {said}", style="bold yellow")
    return Text("VERDICT: all is well.", style="bold green")


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
