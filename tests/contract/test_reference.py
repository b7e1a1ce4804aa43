"""docs/reference has every public name, and what it shows of them is public."""

from __future__ import annotations

import inspect
import pydoc
import re
from collections.abc import Iterator
from operator import attrgetter
from types import ModuleType

import pytest

import outergrad as og
from places import REPOSITORY

PAGES = sorted((REPOSITORY / "docs" / "reference").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
DOCUMENTED = re.findall(r"^::: outergrad\.([\w.]+)$", TEXT, re.MULTILINE)
INTEGRATIONS = ("accelerate", "fabric", "lightning", "nvflare.job", "transformers")
MODULES = {name for name in og.__all__ if isinstance(getattr(og, name), ModuleType)}


def public_names() -> Iterator[str]:
    yield from sorted(set(og.__all__) - MODULES)
    for name in sorted(MODULES):
        module = getattr(og, name)
        own = [n for n, v in vars(module).items() if inspect.getmodule(v) is module]
        yield from (f"{name}.{public}" for public in getattr(module, "__all__", own))


def the_object(name: str) -> object:
    return attrgetter(name)(og)


@pytest.mark.parametrize("name", list(public_names()))
def test_the_reference_has_every_public_name(name):
    assert any(the_object(known) is the_object(name) for known in DOCUMENTED)


@pytest.mark.parametrize("name", list(public_names()))
def test_help_shows_no_addresses(name):
    """A default without a name of its own would be shown as an object at some address."""
    shown = pydoc.render_doc(the_object(name), renderer=pydoc.plaintext) if name[0] != "_" else ""
    assert not re.search(r"\bat 0x[0-9a-f]+|<factory>|<lambda>", shown)


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_help_of_the_integrations_shows_no_addresses(name):
    module = pytest.importorskip(f"outergrad.integrations.{name}")
    for found in (v for v in vars(module).values() if inspect.getmodule(v) is module):
        if inspect.isclass(found) or inspect.isfunction(found):
            assert " at 0x" not in str(inspect.signature(found))


def test_help_says_what_a_first_call_has_to_know():
    shown = pydoc.render_doc(og.distribute, renderer=pydoc.plaintext)
    for wanted in ("og.TorchDistributed()", "og.Star(kit=...)", "optimizer", "og.Auto()"):
        assert wanted in shown


def test_every_method_says_when_to_choose_it():
    methods = (REPOSITORY / "docs" / "reference" / "methods.md").read_text()
    names = re.findall(r"^::: outergrad\.(\w+)$", methods, re.MULTILINE)
    assert len(names) > 9
    for name in names:
        assert re.search(r"\b[Cc]hoose it\b", getattr(og, name).__doc__), name


def test_signatures_have_no_private_names():
    """Of what is shown: all names that the package defines are in the reference themselves."""
    griffe = pytest.importorskip("griffe", reason="make docs installs it")
    extensions = griffe.load_extensions(str(REPOSITORY / "docs" / "aliases.py"))
    package = griffe.load("outergrad", search_paths=[REPOSITORY / "src"], extensions=extensions)
    known = {package[name].canonical_path for name in DOCUMENTED}
    shown = re.findall(
        r"^::: outergrad\.([\w.]+)\n(?:    options:\n((?:      .*\n)+))?", TEXT + "\n", re.MULTILINE
    )
    strange = [
        (where, name)
        for entry, options in shown
        for where, names in shown_names(griffe, package[entry], options)
        for name in names
        if name.startswith("outergrad.")
        and package[name.removeprefix("outergrad.")].canonical_path not in known
    ]
    assert not strange


def shown_names(griffe, found, options: str) -> Iterator[tuple[str, set[str]]]:
    """The names in the signatures of one entry of the reference."""
    found = found.final_target if found.is_alias else found
    if found.is_class:
        if "merge_init_into_class: false" not in options:
            yield found.path, in_signature(griffe, found.parameters)
        listed = re.search(r"members: \[(.*)\]", options)
        members = listed[1].split(", ") if listed else [m for m in found.members if m[0] != "_"]
        if "members: false" not in options:
            for member in members:
                yield f"{found.path}.{member}", in_object(griffe, found.all_members[member])
    else:
        yield found.path, in_object(griffe, found)


def in_object(griffe, found) -> set[str]:
    found = found.final_target if found.is_alias else found
    if found.is_function:
        return in_signature(griffe, found.parameters) | names_of(griffe, found.returns)
    return names_of(griffe, found.annotation)


def in_signature(griffe, parameters) -> set[str]:
    parts = [part for p in parameters for part in (p.annotation, p.default)]
    return set().union(*(names_of(griffe, part) for part in parts))


def names_of(griffe, node) -> set[str]:
    if not isinstance(node, griffe.Expr):
        return set()
    parts = [node, *node.iterate(flat=True)]
    return {part.canonical_path for part in parts if isinstance(part, griffe.ExprName)}
