"""Command ``outergrad audit``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from outergrad._printable import printable
from outergrad._whole_files import PRIVATE, write_whole
from outergrad.launch.console import errors_in_one_line, step_bars
from outergrad.launch.errors import RecipeError
from outergrad.tools.audit.audit import Question, Seen, audit
from outergrad.tools.audit.page import write_audit
from outergrad.tools.audit.table import findings_table
from outergrad.tools.audit.verdict import verdict
from outergrad.tools.commands.options import DATA_DIR, METHOD_HELP, DataDir
from outergrad.tools.plan.subject import known

SHOWN = 1
"""Texts that are shown per method, batch size and observer."""
WIDTH = 160
"""Columns of output that is not written to a terminal."""
ROWS = "1,8,32"
AUDITED = "dense,dad,dad-activations,edad,rank-dad:rank=4:reduce=all_reduce,sparse"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "--workload",
        help=f"One of {', '.join(known())}; or module:factory, a function of your own that is "
        "given the number of rows and returns (model, inputs, labels), for cross-entropy.",
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        show_default=AUDITED,
        help=f"With commas, of: {METHOD_HELP}. dense@8 is under differential privacy with ε 8 in "
        "one step.",
    ),
]
Rows = Annotated[
    str | None, typer.Option(help="Batch sizes of a site, with commas.", show_default=ROWS)
]
Recorded = Annotated[
    Path | None,
    typer.Option(
        help="File of og.FileTap: its steps are attacked, of a training of your own.",
        dir_okay=False,
    ),
]
Lr = Annotated[
    float | None,
    typer.Option(help="With --recorded of og.LocalSteps: learning rate of each site's own steps."),
]
Positions = Annotated[
    int | None,
    typer.Option(help="Cut texts to so many tokens.", show_default="as long as they are"),
]
Matching = Annotated[
    bool,
    typer.Option(
        "--matching", help="Match inputs by optimisation, too, for up to 2 rows: it takes minutes."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="PyTorch's.", show_default="as PyTorch chooses")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Page with the truth beside what came back.", dir_okay=False),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="File that gets all of it.", dir_okay=False)
]


def audit_command(
    model: Model = "mlp",
    methods: Methods = None,
    rows: Rows = None,
    recorded: Recorded = None,
    lr: Lr = None,
    positions: Positions = None,
    matching: Matching = False,
    data_dir: DataDir = DATA_DIR,
    threads: Threads = None,
    out: Out = None,
    json_file: JsonFile = None,
) -> None:
    """Attack what each method sends, and show what came back of the data.

    Three sites run here in one process, on one step. Attacks get what leaves a site, as its
    receivers decode it, and the model. With --recorded they get what a site has sent in a training
    of your own.
    """
    with errors_in_one_line():
        for option, value in (("--methods", methods), ("--rows", rows)):
            if recorded is not None and value is not None:
                raise RecipeError(f"{option} does not go with --recorded: the file says it")
        if recorded is None and lr is not None:
            raise RecipeError("--lr is for --recorded alone")
        question = Question(
            model=model,
            methods=tuple(map(str.strip, (methods or AUDITED).split(","))),
            rows=_numbers(rows or ROWS),
            positions=positions,
            matching=matching,
            data_dir=data_dir,
            recorded=recorded,
            lr=lr,
        )
        for option, path in (("-o", out), ("--json", json_file)):
            if path is not None and not path.resolve().parent.is_dir():
                raise RecipeError(f"{option} {path}: there is no folder {path.resolve().parent}")
        if threads is not None:
            torch.set_num_threads(threads)
        seen = _watched(question)
        show(seen)
        if out is not None:
            _save(out, "-o", lambda: write_audit(question, seen, out))
            print(f"The truth beside what came back: {out.resolve()}")
        if json_file is not None:
            told = json.dumps([one.as_dict() for one in seen], indent=1) + "\n"
            _save(json_file, "--json", lambda: write_whole(json_file, told, mode=PRIVATE))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RecipeError(f"--rows {text}: write batch sizes with commas, as 1,8,32") from None


def _watched(question: Question) -> list[Seen]:
    with step_bars(shown=True) as bars:
        cases = len(question.methods) * len(question.rows)
        task = bars.add_task(question.model, total=None if question.recorded else cases)

        def progress(told: str) -> None:
            bars.update(task, advance=1, description=escape(f"{question.model}: {told}"))

        return audit(question, progress)


def show(seen: list[Seen]) -> None:
    """Prints an audit: its table and its sentences."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(findings_table(seen))
    sources = dict.fromkeys(one.source for one in seen if one.source)
    told = [f"Attacked: {'; '.join(sources)}."]
    texts = dict.fromkeys(text for one in seen for text in one.texts[:SHOWN])
    told += [f"A text that came back: {text!r}" for text in texts]
    refused = {one.method: one for one in seen if one.refused}.values()
    told += [f"{one.method} was refused: {one.refused}" for one in refused]
    for sentence in [*told, *verdict(seen)]:  # a recorded method is whatever its file says
        console.print(printable(sentence), highlight=False, markup=False)


def _save(path: Path, option: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise RecipeError(f"{option} {path}: {error.strerror}") from error
