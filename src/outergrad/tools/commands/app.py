"""The ``outergrad`` command: the commands beside this file, and those that other packages add."""

from importlib.metadata import entry_points

import typer

from outergrad.tools.commands.doctor import doctor
from outergrad.tools.commands.hub import hub_app
from outergrad.tools.commands.plan import plan
from outergrad.tools.commands.report import report
from outergrad.tools.commands.site import site
from outergrad.tools.commands.watch import watch

app = typer.Typer(
    help="Distributed auto-differentiation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
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
app.command(context_settings={"allow_interspersed_args": False})(site)
