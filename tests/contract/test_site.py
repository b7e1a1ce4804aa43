"""The documentation's site: commands from their parsers, tables that fit, commands that work."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType, SimpleNamespace

import pytest
import typer

from outergrad import __version__
from outergrad.tools.commands.app import app
from places import REPOSITORY
from written import ALL, blocks

NO_INDEX = re.compile(r"pip install [^`\n]*\boutergrad\b(?!-)")
WHEEL = re.compile(r"outergrad-([\w.]+)-py3-none-any\.whl(\[.*?\])?")
INLINE = re.compile(r"`([^`\n]+)`")


def hook(name: str) -> ModuleType:
    pytest.importorskip("mkdocs", reason="make docs installs it")
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- commands -------------------------------------------------------------------------------------


def commands():
    """Every command that does something, by all of its words."""
    root = typer.main.get_command(app)
    for name in root.commands:
        with root.make_context("outergrad", [name]) as context:
            found = root.resolve_command(context, [name])[1]
        parts = getattr(found, "commands", {})
        yield from ((f"{name} {part}", parts[part]) for part in parts)
        if not parts:
            yield name, found


def test_the_reference_has_every_command_with_every_option():
    page = (REPOSITORY / "docs" / "reference" / "commands.md").read_text()
    shown = hook("commands").on_page_markdown(page, page=SimpleNamespace())
    sections = dict(re.findall(r"^##+ outergrad (.*?) \{.*?$(.*?)(?=^##|\Z)", shown, re.M | re.S))
    for name, command in commands():
        assert command.help.splitlines()[0] in sections[name]
        wanted = [o for p in command.params if not getattr(p, "hidden", False) for o in p.opts]
        assert wanted, name
        assert not [option for option in wanted if option not in sections[name]], name


# -- tables ---------------------------------------------------------------------------------------

PRINTED = """```text
parameter  other sites learn
---------  --------------------
0.weight   this site's gradient
...
```
"""


def test_a_printed_table_becomes_one_with_a_label_in_every_cell():
    shown = hook("tables").on_page_markdown(PRINTED)
    assert re.findall(r"<th>(.*?)</th>", shown) == ["parameter", "other sites learn"]
    cells = re.findall(r'<td data-label="(.*?)"(?: data-short)?>(.*?)</td>', shown)
    assert cells[:2] == [
        ("parameter", "0.weight"),
        ("other sites learn", "this site&#x27;s gradient"),
    ]


def test_what_is_printed_otherwise_stays_a_block():
    block = "```text\nrun 1 begins -- all came\n---\n```\n"
    assert hook("tables").on_page_markdown(block) == block


def test_commands_are_read_as_a_shells_and_not_as_output():
    assert hook("tables").on_page_markdown("```console\nmake\n```\n") == "```bash\nmake\n```\n"
    indented = "A table:\n\n    outergrad data list\n    outergrad doctor\n"
    commands = "A table:\n\n```bash\noutergrad data list\noutergrad doctor\n```\n"
    assert hook("tables").on_page_markdown(indented) == commands


# -- lists ----------------------------------------------------------------------------------------


def test_a_list_needs_no_empty_line_above():
    page = SimpleNamespace(is_homepage=False, file=SimpleNamespace(src_uri="a.md"))
    text = "These:\n- a\n- b\n\n```text\nkept\n- as it is\n```\n"
    shown = hook("hooks").on_page_markdown(text, page=page)
    assert shown == "These:\n\n- a\n- b\n\n```text\nkept\n- as it is\n```\n"


# -- what installs it -----------------------------------------------------------------------------


def typed(page) -> str:
    """What a page tells to type: commands in blocks and in sentences."""
    in_blocks = [block.code for block in blocks(page) if block.language == "console"]
    text = page.read_text()
    for block in blocks(page):
        text = text.replace(block.code, "")
    return "\n".join([*in_blocks, *INLINE.findall(text)])


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_no_page_has_pip_look_for_outergrad_on_an_index(page):
    assert not NO_INDEX.search(typed(page))


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_wheels_are_of_this_version_and_with_extras_that_are_there(page):
    table = (REPOSITORY / "pyproject.toml").read_text()
    for version, extras in re.findall(
        r"outergrad-([\w.]+)-py3-none-any\.whl(\[.*?\])?", typed(page)
    ):
        assert version == __version__
        assert all(f"\n{extra} = [" in table for extra in extras.strip("[]").split(",") if extra)
