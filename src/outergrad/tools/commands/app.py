"""The ``outergrad`` command: the commands beside this file, and those that other packages add.

A command is imported when it is called, because PyTorch takes seconds to import.
"""

from __future__ import annotations

import ast
import platform
import sys
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from inspect import cleandoc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from outergrad import __version__

_GROUP = "outergrad.commands"
_OWN = {
    "report": "report:report",
    "statement": "statement:statement",
    "watch": "watch:watch",
    "doctor": "doctor:doctor",
    "plan": "plan:plan",
    "audit": "audit:audit_command",
    "hub": "hub:hub_app",
    "site": "site:site_app",
}


class LazyCommands(TyperGroup):
    """A group whose commands are imported when they are called.

    Until then a command is known by its help text, which is read from its module's source.
    """

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        own = [
            EntryPoint(name, f"outergrad.tools.commands.{where}", _GROUP)
            for name, where in _OWN.items()
        ]
        self._entries = {entry.name: entry for entry in [*entry_points(group=_GROUP), *own]}
        self.commands = {
            name: TyperCommand(name, help=_help_of(entry)) for name, entry in self._entries.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Imports the command that is called.

        Raises:
            SystemExit: something that it needs is not installed.
        """
        name, _, rest = super().resolve_command(ctx, args)
        return name, _loaded(self._entries[str(name)]), rest


def _loaded(entry: EntryPoint) -> Any:
    try:
        found = entry.load()
    except ImportError as error:
        sys.exit(f"outergrad: {error}")
    if isinstance(found, typer.Typer):
        loaded = typer.main.get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command()(found)
        loaded = typer.main.get_command(alone)
    loaded.name = entry.name
    return loaded


def _help_of(entry: EntryPoint) -> str:
    """Returns a function's docstring, or the `help=` of a `typer.Typer`, without importing it."""
    spec = find_spec(entry.module)
    source = spec.loader.get_source(entry.module) if spec and spec.loader else None  # type: ignore[attr-defined]
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            told = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if entry.attr in names and isinstance(told.get("help"), ast.Constant):
                return cleandoc(ast.literal_eval(told["help"]))
    return ""


app = typer.Typer(
    cls=LazyCommands,
    help="Distributed auto-differentiation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        versions = f"outergrad {__version__}, torch {version('torch')}"
        typer.echo(f"{versions}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Versions, and nothing else.", callback=_tell_version, is_eager=True
        ),
    ] = False,
) -> None: ...
