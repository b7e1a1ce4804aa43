"""The reference page of commands, written from the command line's own parsers at each build."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from mkdocs.structure.pages import Page

from outergrad.tools.commands.app import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Puts the commands in the place that is left for them."""
    return markdown.replace(PLACE, "\n\n".join(every_command())) if PLACE in markdown else markdown


def every_command() -> Iterator[str]:
    """Sections of Markdown, one per command, those of a group behind it."""
    root = typer.main.get_command(app)
    for name in sorted(root.commands):
        with root.make_context("outergrad", [name]) as context:
            command = root.resolve_command(context, [name])[1]
        yield from _sections(command, f"outergrad {name}")


def _sections(command: Any, name: str, level: str = "##") -> Iterator[str]:
    yield f"{level} {name} {{ #{name.replace(' ', '-')} }}"
    yield command.help or ""
    parts = getattr(command, "commands", {})
    for part in parts:
        yield from _sections(parts[part], f"{name} {part}", f"{level}#")
    if not parts:
        context = typer.Context(command, info_name=name)
        yield f"```console\n{' '.join([name, *command.collect_usage_pieces(context)])}\n```"
        yield "\n".join(_table(command, context))


def _table(command: Any, context: Any) -> Iterator[str]:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    records = list(filter(None, (p.get_help_record(context) for p in shown)))
    yield from ["| option | meaning |", "|---|---|"] if records else []
    for words, meaning in records:
        yield f"| `{words}` | {meaning.replace('|', chr(92) + '|')} |"
