"""The shape of the library's classes, read from its syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from places import REPOSITORY

FILES = sorted((REPOSITORY / "src" / "outergrad").rglob("*.py"))
NODES = {file: [*ast.walk(ast.parse(file.read_text()))] for file in FILES}
RIDDLE = re.compile(
    r"(What|Whether|How|Who|Whose|Where|Those|It|Its|The one|The same|Of|Another)\b"
)


def classes() -> dict[str, ast.ClassDef]:
    """All classes by name; a name that occurs twice stands for its last class."""
    nodes = (node for found in NODES.values() for node in found)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


CLASSES = classes()


def bases(name: str) -> list[str]:
    """Names of the bases that are classes of the library."""
    found = [ast.unparse(base).split("[")[0].split(".")[-1] for base in CLASSES[name].bases]
    return [base for base in found if base in CLASSES and base != name]


def is_aside(name: str) -> bool:
    """True for protocols and errors, of which a class may have more."""
    every = [ast.unparse(base).split("[")[0] for base in CLASSES[name].bases]
    return "Protocol" in every or name.endswith("Error")


def ancestors(name: str) -> set[str]:
    found = set(bases(name))
    return found.union(*(ancestors(base) for base in found))


def assigned(name: str) -> set[str]:
    """Attributes of `self` to which the class itself assigns."""
    nodes = (node for node in ast.walk(CLASSES[name]) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in nodes
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def documented() -> Iterator[tuple[str, str]]:
    for file, nodes in NODES.items():
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    line = getattr(node, "lineno", 1)
                    yield f"{file.relative_to(REPOSITORY)}:{line}", text.partition("\n")[0]


@pytest.mark.parametrize("name", [name for name in CLASSES if bases(name)])
def test_a_class_is_not_divided_by_inheritance(name):
    own = [base for base in ancestors(name) if not is_aside(base)]
    assert len(own) <= 2, f"{name} has the ancestors {own}: give it parts instead"
    for base in own:
        both = assigned(name) & assigned(base)
        assert not both, f"{name} and its base {base} both assign {both}"


def test_no_method_waits_for_a_descendant():
    for name, node in CLASSES.items():
        for method in (one for one in node.body if isinstance(one, ast.FunctionDef)):
            body = [one for one in method.body if not isinstance(one, ast.Expr)]
            raises = [one for one in body if isinstance(one, ast.Raise)]
            stub = len(body) == 1 and raises and "NotImplementedError" in ast.unparse(raises[0])
            assert not stub, f"{name}.{method.name} only raises NotImplementedError"


def test_no_code_asks_what_kind_of_step_it_has():
    kinds = {"UnsyncedStep", "SharedStep", "MeshStep"}
    for file, nodes in NODES.items():
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not asked & kinds, f"{file}:{node.lineno} asks for {asked & kinds}"


def test_docstrings_open_with_a_statement():
    riddles = [f"{place} {line}" for place, line in documented() if RIDDLE.match(line)]
    assert not riddles, "\n".join(riddles)
