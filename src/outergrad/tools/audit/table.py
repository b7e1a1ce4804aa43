"""The audit as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from outergrad._printable import printable
from outergrad.tools.audit.audit import Seen
from outergrad.tools.audit.findings import Finding


def attacks_of(seen: Sequence[Seen]) -> list[str]:
    """Returns the names of all attacks, in their order."""
    return list(dict.fromkeys(f.attack for one in seen for f in one.findings))


def told(finding: Finding | None) -> str:
    """Returns an attack's figure in a cell, with false alarms; a dash where it does not fit."""
    if finding is None:
        return "-"
    if finding.by_quality:
        return finding.figure
    figure = f"{finding.found:g}/{finding.of}" if finding.of else f"{finding.found:.2f}"
    return f"{figure} ({finding.false} false)" if finding.false else figure


def findings_table(seen: Sequence[Seen]) -> Table:
    """Returns a row per method, batch size and observer, and a column per attack."""
    table = Table(
        title="What came back: found / all there were; AUC of members by products (chance is 0.5)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    attacks = attacks_of(seen)
    table.add_column("method", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_column("seen", no_wrap=True)
    for attack in attacks:
        table.add_column(attack, justify="right")
    for one in seen:
        method = escape(printable(one.method))  # a recorded one is whatever its file says
        if one.refused:
            table.add_row(method, str(one.rows), "refused")
            continue
        by_attack = {finding.attack: finding for finding in one.findings}
        cells = [told(by_attack.get(attack)) for attack in attacks]
        table.add_row(method, str(one.rows), one.observer, *cells)
    return table
