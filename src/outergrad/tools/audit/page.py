"""The audit as an HTML page: the truth beside what came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from torch import Tensor

from outergrad._whole_files import PRIVATE, write_whole
from outergrad.report.page import whole_page
from outergrad.tools.audit.audit import Question, Seen
from outergrad.tools.audit.findings import Finding
from outergrad.tools.audit.pictures import data_uri
from outergrad.tools.audit.table import attacks_of, told
from outergrad.tools.audit.texts import text_pair
from outergrad.tools.audit.verdict import verdict

_STYLE = """
.audit { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.audit { font-size: 0.86rem; line-height: 1.4; }
.audit th, .audit td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); }
.audit td { text-align: right; }
.audit tbody th { text-align: left; font-weight: normal; }
.audit td[data-share] { background: rgb(200 60 40 / var(--share)); }
.pairs { display: flex; flex-wrap: wrap; gap: 0.8rem; }
.pairs figure { margin: 0; }
.pairs img { display: block; width: 84px; image-rendering: pixelated; margin-bottom: 3px; }
.pairs figcaption { color: var(--quiet); font-size: 0.8rem; }
.wide { overflow-x: auto; }
.audit .words { text-align: left; min-width: 6rem; }
.audit .words + .words { min-width: 8.5rem; }
.main thead th:first-child { text-align: left; }
.audit td[data-share] { white-space: nowrap; }
.layers td { text-align: left; white-space: nowrap; }
summary { cursor: pointer; }
.texts { display: grid; gap: 0.8rem; }
.texts figure { margin: 0; min-width: 0; }
.texts figcaption { color: var(--quiet); font-size: 0.8rem; }
.texts table { border-collapse: collapse; font: 0.8rem/1.4 ui-monospace, monospace; }
.texts td { padding: 0.1rem 0.35rem; text-align: right; }
.texts th { padding-right: 0.6rem; color: var(--quiet); font-weight: normal; text-align: left; }
.texts mark { background: rgb(200 60 40 / 0.35); color: inherit; }
@media (max-width: 700px) {
  .main thead { display: none; }
  .main, .main tbody, .main tr { display: block; }
  .main tr { padding-bottom: 1.2rem; }
  .main tbody th { display: block; font-weight: 600; }
  .main td, .main .words { display: flex; justify-content: space-between; gap: 1rem; }
  .main td, .main .words { text-align: right; }
  .main td::before { content: attr(data-name); color: var(--quiet); text-align: left; }
  .main td[data-share]::before { color: inherit; }
}
"""
_LEAD = (
    "Each row is what one observer has of one step; each column an attack on it, which has the "
    "model besides. A cell says how much came back of how much there was, and how much was claimed "
    "that is not true. The redder, the more came back beyond a guess."
)


def write_audit(question: Question, seen: Sequence[Seen], path: Path) -> int:
    """Writes the page, in one file that its owner alone may read; returns its size in bytes.

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
        body=_table(seen) + "".join(_galleries(seen)) + _by_layer(seen),
        style=_STYLE,
    ).encode()
    write_whole(path, content, mode=PRIVATE)
    return len(content)


def _table(seen: Sequence[Seen]) -> str:
    attacks = attacks_of(seen)
    heads = ["method", "rows", "seen", "by whom", *attacks]
    head = "".join(f"<th scope=col>{escape(one)}</th>" for one in heads)
    body = "".join(_row(one, attacks) for one in seen)
    return (
        f'<section><h2>By method, batch size and observer</h2><div class="wide">'
        f'<table class="audit main"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
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
        shown = [finding for finding in one.findings if finding.pairs and finding.found]
        if shown:
            best = max(shown, key=lambda finding: finding.share)
            title = f"{one.method}, {one.rows} in a batch, {one.observer}: {best.figure}"
            yield f"<section><h2>{escape(title)}</h2>{_pairs(best)}</section>\n"


def _pairs(finding: Finding) -> str:
    is_text = not finding.pairs[0][0].is_floating_point()
    figures = text_pair if is_text else _images
    shown = "".join(figures(*pair) for pair in finding.pairs)
    caption = f"Above the truth, below what came back: {finding.attack}."
    if is_text:
        caption += " Tokens by their numbers; wrong ones are marked, dots stand for nothing."
    box = "texts" if is_text else "pairs"
    return f'<p class="what">{escape(caption)}</p><div class="{box}">{shown}</div>'


def _images(truth: Tensor, back: Tensor) -> str:
    low, high = float(truth.min()), float(truth.max())
    above, below = (data_uri(one, low, high) for one in (truth, back))
    return (
        f'<figure><img src="{above}" alt="a true row"><img src="{below}" alt="what came back">'
        f"</figure>"
    )


def _by_layer(seen: Sequence[Seen]) -> str:
    """Returns all figures of all attacks, with the layer that each looked at."""
    heads = (
        "method",
        "rows",
        "seen",
        "attack",
        "layer",
        "figure",
        "beyond a guess",
        "claimed wrongly",
    )
    head = "".join(f"<th scope=col>{one}</th>" for one in heads)
    body = "".join(_figures(one, finding) for one in seen for finding in one.findings)
    return (
        f"<section><details><summary>Every attack, with the layer that it looked at</summary>"
        f'<div class="wide"><table class="audit layers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></details></section>\n"
    )


def _figures(one: Seen, finding: Finding) -> str:
    words = (one.method, str(one.rows), one.observer, finding.attack, finding.layer, finding.figure)
    share = f"{finding.share:.0%}"
    alarms = f"{finding.false}" + (f", {finding.canaries} canaries" if finding.canaries else "")
    cells = "".join(f"<td>{escape(text)}</td>" for text in (*words, share, alarms))
    return f"<tr>{cells}</tr>"
