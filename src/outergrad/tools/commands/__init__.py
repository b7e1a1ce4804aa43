"""The commands of ``outergrad``, one file each."""

import typer

from outergrad.tools.commands.bench import bench
from outergrad.tools.commands.data import data_app
from outergrad.tools.commands.doctor import doctor
from outergrad.tools.commands.plan import plan
from outergrad.tools.commands.report import report
from outergrad.tools.commands.reproduce import reproduce
from outergrad.tools.commands.train import train
from outergrad.tools.commands.watch import watch

app = typer.Typer(
    help="Distributed auto-differentiation for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(bench)
app.command()(report)
app.command()(watch)
app.command()(doctor)
app.command()(plan)
app.command()(reproduce)
app.add_typer(data_app, name="data")
