"""Signatures in the reference say what private names stand for: a `Literal[...]`, not `Reduce`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import griffe


class ExpandAliases(griffe.Extension):
    """Puts the value of a module's alias of types, or of a constant, in the place of its name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Looks at every annotation of the package."""
        self._package = pkg
        self._expand_all(pkg)

    def _expand_all(self, parent: griffe.Module | griffe.Class) -> None:
        for member in parent.members.values():
            if member.is_alias:
                continue
            if isinstance(member, griffe.Module | griffe.Class):
                self._expand_all(member)
            elif isinstance(member, griffe.Attribute):
                member.annotation = self._expanded(member.annotation)
                if parent.is_class:
                    member.value = self._constant(member.value)
            elif isinstance(member, griffe.Function):
                member.returns = self._expanded(member.returns)
                for parameter in member.parameters:
                    parameter.annotation = self._expanded(parameter.annotation)
                    parameter.default = self._constant(parameter.default)

    def _constant(self, node: Any) -> Any:
        """A default, as 4 for `_RANK`."""
        value = self._value_of(node)
        return value if isinstance(value, str) else node

    def _expanded(self, node: Any) -> Any:
        """An annotation without aliases of types."""
        value = self._value_of(node)
        if isinstance(value, griffe.Expr):
            return self._expanded(value)
        if isinstance(node, list | tuple):
            return type(node)(map(self._expanded, node))
        if isinstance(node, griffe.Expr) and is_dataclass(node):
            for field in fields(node):
                setattr(node, field.name, self._expanded(getattr(node, field.name)))
        return node

    def _value_of(self, node: Any) -> Any:
        """What a name of a module stands for; None if it is no such name of this package."""
        if not isinstance(node, griffe.ExprName | griffe.ExprAttribute):
            return None
        package, _, name = node.canonical_path.partition(".")
        try:
            found = self._package[name] if name and package == self._package.name else None
        except KeyError:
            return None
        named = isinstance(found, griffe.Attribute) and found.parent is not None
        return found.value if named and found.parent.is_module else None
