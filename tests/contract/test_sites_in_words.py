"""Messages call sites by `Site.called`, which has the names of institutions, never by numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from places import REPOSITORY

LIBRARY = REPOSITORY / "src" / "outergrad"
NAMELESS = ("integrations", "launch", "record", "report", "session/mesh", "tools")
"""Rooms whose sites have numbers alone: processes of torchrun, events in files, ranks of a mesh."""
FILES = [
    file
    for file in sorted(LIBRARY.rglob("*.py"))
    if not str(file.relative_to(LIBRARY)).startswith(NAMELESS)
]
BEFORE_A_NUMBER = re.compile(r"\b[Ss]ites? (number )?$")
NUMBER = re.compile(r"\b[Ss]ites? (\d|%[dsr]|\{)")
ITSELF = "core/sites.py"


def docstrings(tree: ast.AST) -> set[int]:
    """Texts that nobody is told: docstrings, and those below attributes."""
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(node.value) for node in nodes}


def numbers_in(source: str) -> Iterator[tuple[int, str]]:
    """Places where a text for people gives the number of a site, with the text before it."""
    tree = ast.parse(source)
    unsaid = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for before, value in zip(node.values, node.values[1:], strict=False):
                text = getattr(before, "value", None)
                is_name = isinstance(value, ast.FormattedValue) and value.conversion == ord("r")
                if isinstance(text, str) and BEFORE_A_NUMBER.search(text) and not is_name:
                    yield node.lineno, text
        elif isinstance(node, ast.Constant) and id(node) not in unsaid:
            text = node.value
            if isinstance(text, str) and NUMBER.search(text):
                yield node.lineno, text


def test_no_message_gives_a_number_where_a_name_may_be_known():
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: {text!r}"
        for file in FILES
        if str(file.relative_to(LIBRARY)) != ITSELF
        for line, text in numbers_in(file.read_text())
    ]
    assert not found, "use Site.called (core/sites.py):\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("f'site {rank} is lost'", 1),
        ("f'lost sites {ranks}'", 1),
        ("f'of Site {a + b}'", 1),
        ("told = 'the model of site 0'", 1),
        ("log.warning('site %d is lost', rank)", 1),
        ("told = 'site {} is lost'.format(rank)", 1),
        ("f'no site {name!r}'", 0),
        ("f'{site.called} is lost'", 0),
        ("def f():\n    '''The model of site 0.'''", 0),
    ],
)
def test_such_a_message_is_found(source, count):
    assert len([*numbers_in(source)]) == count
