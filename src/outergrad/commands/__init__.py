"""The commands of ``outergrad``, one file each."""

import typer

from outergrad.commands.bench import bench
from outergrad.commands.data import data_app
from outergrad.commands.doctor import doctor
from outergrad.commands.plan import plan
from outergrad.commands.report import report
from outergrad.commands.reproduce import reproduce
from outergrad.commands.train import train
from outergrad.commands.watch import watch

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
