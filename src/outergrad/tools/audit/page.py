"""The audit as an HTML page: the truth beside what came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from outergrad._whole_files import write_whole
from outergrad.report.page import whole_page
from outergrad.tools.audit.audit import Question, Seen
from outergrad.tools.audit.campaign import Finding
from outergrad.tools.audit.pictures import data_uri
from outergrad.tools.audit.table import attacks_of, told
from outergrad.tools.audit.verdict import verdict

_STYLE = """
.audit { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.audit th, .audit td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); }
.audit td { text-align: right; }
.audit tbody th { text-align: left; font-weight: normal; }
.audit td[data-share] { background: rgb(200 60 40 / var(--share)); }
.pairs { display: flex; flex-wrap: wrap; gap: 0.8rem; }
.pairs figure { margin: 0; }
.pairs img { display: block; width: 84px; image-rendering: pixelated; margin-bottom: 3px; }
.pairs figcaption { color: var(--quiet); font-size: 0.8rem; }
.wide { overflow-x: auto; }
.audit .words { text-align: left; }
.audit td[data-share] { white-space: nowrap; }
@media (max-width: 700px) {
  .audit thead { display: none; }
  .audit, .audit tbody, .audit tr { display: block; }
  .audit tr { padding-bottom: 1.2rem; }
  .audit tbody th { display: block; font-weight: 600; }
  .audit td, .audit .words { display: flex; justify-content: space-between; gap: 1rem; }
  .audit td, .audit .words { text-align: right; }
  .audit td::before { content: attr(data-name); color: var(--quiet); text-align: left; }
  .audit td[data-share]::before { color: inherit; }
}
"""
_LEAD = (
    "Each row is what one observer has of one step; each column an attack on it, which has the "
    "model besides. A cell says how much came back of how much there was, and how much was claimed "
    "that is not true. The redder, the more came back beyond a guess."
)


def write_audit(question: Question, seen: Sequence[Seen], path: Path) -> int:
    """Writes the page, in one file; returns its size in bytes.

    Raises:
        OSError: It cannot be written; an existing one stays.
    """
    sentences = "".join(f"<li>{escape(one)}</li>" for one in verdict(seen))
    content = whole_page(
        command="outergrad audit",
        about=f" --model {question.model}",
        title=f"What came back of {question.model}",
        lead=_LEAD,
        head=f'<ul class="verdict">{sentences}</ul>',
        body=_table(seen) + "".join(_galleries(seen)),
        style=_STYLE,
    ).encode()
    write_whole(path, content)
    return len(content)


def _table(seen: Sequence[Seen]) -> str:
    attacks = attacks_of(seen)
    heads = ["method", "rows", "seen", "by whom", *attacks]
    head = "".join(f"<th scope=col>{escape(one)}</th>" for one in heads)
    body = "".join(_row(one, attacks) for one in seen)
    return (
        f'<section><h2>By method, batch size and observer</h2><div class="wide">'
        f'<table class="audit"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"</div></section>\n"
    )


def _row(one: Seen, attacks: Sequence[str]) -> str:
    start = f'<th scope=row>{escape(one.method)}</th><td data-name="rows">{one.rows}</td>'
    if one.refused:
        width = len(attacks) + 2
        refused = f'<td class="words" colspan={width} data-name="refused">{escape(one.refused)}'
        return f"<tr>{start}{refused}</td></tr>"
    by_attack = {finding.attack: finding for finding in one.findings}
    cells = "".join(_cell(attack, by_attack.get(attack)) for attack in attacks)
    words = "".join(
        f'<td class="words" data-name="{name}">{escape(text)}</td>'
        for name, text in (("seen", one.observer), ("by whom", one.who))
    )
    return f"<tr>{start}{words}{cells}</tr>"


def _cell(attack: str, finding: Finding | None) -> str:
    name = f'data-name="{escape(attack, quote=True)}"'
    if finding is None:
        return f"<td {name}>\N{EN DASH}</td>"
    about = escape(f"{finding.layer}: {finding.figure}", quote=True)
    share = f"{0.6 * finding.share:.2f}"
    text = escape(told(finding))
    return f'<td {name} data-share title="{about}" style="--share: {share}">{text}</td>'


def _galleries(seen: Sequence[Seen]) -> Iterator[str]:
    """Yields the pictures of the attack that brought most, per method, batch size and observer."""
    for one in seen:
        shown = [finding for finding in one.findings if finding.pictures and finding.found]
        if shown:
            best = max(shown, key=lambda finding: finding.share)
            title = f"{one.method}, {one.rows} in a batch, {one.observer}: {best.figure}"
            yield f"<section><h2>{escape(title)}</h2>{_pairs(best)}</section>\n"


def _pairs(finding: Finding) -> str:
    figures = []
    for truth, back in finding.pictures:
        low, high = float(truth.min()), float(truth.max())
        above, below = (data_uri(one, low, high) for one in (truth, back))
        figures.append(
            f'<figure><img src="{above}" alt="a true row"><img src="{below}" alt="what came back">'
            f"</figure>"
        )
    caption = f"Above the truth, below what came back: {finding.attack}."
    return f'<p class="what">{escape(caption)}</p><div class="pairs">{"".join(figures)}</div>'
