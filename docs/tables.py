"""Tables that fit: long cells are stacked on a narrow screen, and printed tables become tables.

Commands are told from what they print: on a forge both are plain blocks.
"""

from __future__ import annotations

import re
from html import escape
from textwrap import dedent
from typing import Any
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig

_PRINTED = re.compile(r"^```text\n(.*\n(-+(?: +-+)+)\n(?:.*\n)*?)```$", re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}(?:outergrad|python|torchrun) .*(?:\n|\Z))+")
_SHORT_CELL = 10
_LONG_CELL = 24
_FEW_COLUMNS = 2
_MANY_COLUMNS = 6


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the labels of cells to what Markdown makes."""
    config.markdown_extensions.append(_Labels())  # type: ignore[arg-type]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes tables of what programs print as such, and has commands read as those of a shell."""
    markdown = _INDENTED.sub(_as_commands, markdown)
    return _PRINTED.sub(_as_table, markdown).replace("```console\n", "```bash\n")


def _as_commands(found: re.Match[str]) -> str:
    return f"```bash\n{dedent(found[0]).rstrip()}\n```\n"


def _as_table(found: re.Match[str]) -> str:
    headings, _, *rows = found[1].splitlines()
    ends = [match.span() for match in re.finditer("-+", found[2])]
    names = _cut(headings, ends)
    body = "".join(_row(_cut(row, ends), names) for row in rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    table = f"<table data-stacked><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="printed">{table}</div>'


def _cut(line: str, ends: list[tuple[int, int]]) -> list[str]:
    return [line[first:last].strip() for first, last in ends]


def _row(cells: list[str], names: list[str]) -> str:
    pairs = zip(cells, names, strict=True)
    return f"<tr>{''.join(_cell(*pair) for pair in pairs)}</tr>"


def _cell(text: str, name: str) -> str:
    short = " data-short" if len(text) <= _SHORT_CELL else ""
    return f'<td data-label="{escape(name)}"{short}>{escape(text)}</td>'


class _Labels(Extension):
    """Writes the heading of its column into each cell, to stand beside it in a stacked row."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.treeprocessors.register(_Labeller(md), "labels", 0)


class _Labeller(Treeprocessor):
    def run(self, root: Element) -> None:
        for table in root.iter("table"):
            _label(table)


def _label(table: Element) -> None:
    names = ["".join(heading.itertext()) for heading in table.iter("th")]
    for row in table.iter("tr"):
        for cell, name in zip(row.findall("td"), names, strict=False):
            cell.set("data-label", name)
            if len("".join(cell.itertext())) <= _SHORT_CELL:
                cell.set("data-short", "")
    lengths = [len("".join(cell.itertext())) for cell in table.iter("td")]
    if len(names) > _FEW_COLUMNS and max(lengths, default=0) > _LONG_CELL:
        table.set("data-stacked", "")
    elif len(names) >= _MANY_COLUMNS:
        table.set("data-wide", "")
