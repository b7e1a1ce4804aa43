"""Entry point of the ``outergrad`` command, including commands that other packages register."""

import platform
from importlib.metadata import entry_points
from typing import Annotated

import torch
import typer

from outergrad import __version__
from outergrad.tools.commands.doctor import doctor
from outergrad.tools.commands.hub import hub_app
from outergrad.tools.commands.plan import plan
from outergrad.tools.commands.report import report
from outergrad.tools.commands.site import site_app
from outergrad.tools.commands.watch import watch

app = typer.Typer(
    help="Distributed auto-differentiation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        python = platform.python_version()
        typer.echo(f"outergrad {__version__}, torch {torch.__version__}, Python {python}")
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


for _entry in entry_points(group="outergrad.commands"):
    _command = _entry.load()
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_entry.name)
    else:
        app.command(_entry.name)(_command)
app.command()(report)
app.command()(watch)
app.command()(doctor)
app.command()(plan)
app.add_typer(hub_app, name="hub")
app.add_typer(site_app, name="site")
