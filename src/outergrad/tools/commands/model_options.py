"""Options of commands that take a model by name, or one of the user's own."""

from typing import Annotated

import typer

from outergrad.tools.plan.subject import known

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--workload",
        help=f"One of {', '.join(known())}; or module:factory, a function of your own that "
        "is given the number of rows and returns (model, inputs).",
    ),
]
Rows = Annotated[
    int | None,
    typer.Option(help="Rows of a batch on one site.", show_default="the workload's own"),
]
