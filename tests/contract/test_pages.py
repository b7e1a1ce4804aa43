"""What README and docs tell a user to type is right: commands parse, programs run."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.distributed.run import get_args_parser

import outergrad as og
from outergrad.tools.commands.app import app
from places import REPOSITORY
from ranks import run_on_lasting_groups
from written import ALL, Block, blocks

NAMES = """
index first-steps two-machines which-method is-it-faster train accumulate unequal-data checkpoints
when-a-site-fails privacy gossip
"""
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs" / f"{n}.md" for n in NAMES.split())]
"""Those that promise to run."""
TUTORIAL = REPOSITORY / "docs" / "first-steps.md"
LANGUAGES = {"console", "python", "text", "mermaid", "ini"}
BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [
    block
    for page in PAGES
    if page != TUTORIAL
    for block in blocks(page)
    if block.language == "python" and block.runs
]
OUTSIDE_OF_BLOCKS = re.compile(r"^ {4}(outergrad .*)$", re.MULTILINE)


def place(block: Block) -> str:
    return block.place


# -- commands -------------------------------------------------------------------------------------


def commands(code: str) -> list[list[str]]:
    """The words of each command of a block, without comments and variables."""
    found = []
    for line in code.splitlines():
        for part in line.removeprefix("$ ").split(" && "):
            words = shlex.split(part, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            found += [words] if words else []
    return found


def parse(args: list[str]) -> None:
    """Has our command line read this, without doing it.

    Raises:
        Exception: there is no such command or option, or a value is of the wrong type.
    """
    command = typer.main.get_command(app)
    name = "outergrad"
    while hasattr(command, "commands") and args and not args[0].startswith("-"):
        assert args[0] in command.commands, f"no command {args[0]!r}"
        with command.make_context(name, list(args)) as context:
            name, command, args = command.resolve_command(context, args)
    with contextlib.suppress(typer.Exit):  # --help and --version say something and end
        command.make_context(name, list(args))


def launch(args: list[str]) -> None:
    """Has torchrun read this; what it would start must be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", None, raising=False)
        given = get_args_parser().parse_args(args)
    if given.module:
        assert given.training_script == "outergrad"
        parse(given.training_script_args)
    else:
        script(given.training_script)


def script(path: str) -> None:
    saved = f"Save this as `{path}`" in TUTORIAL.read_text()
    assert saved or (REPOSITORY / path).is_file(), f"no {path}"


def install(args: list[str]) -> None:
    assert args[:2] == ["install", "-e"]
    (extras,) = re.findall(r"\.(?:\[([\w,]+)\])?$", args[2])
    table = (REPOSITORY / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in table for extra in extras.split(",") if extra)


def make(args: list[str]) -> None:
    rules = (REPOSITORY / "Makefile").read_text()
    assert all(re.search(rf"^(\S+ )*{target}( \S+)*:", rules, re.MULTILINE) for target in args)


KNOWN = {
    "outergrad": parse,
    "torchrun": launch,
    "pip": install,
    "make": make,
    "python": lambda args: script(args[0]),
}


@pytest.mark.parametrize("block", BLOCKS, ids=place)
def test_a_block_says_what_it_is(block):
    assert block.language in LANGUAGES


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "console"], ids=place)
def test_commands_of_the_users_pages_can_be_given(block):
    for name, *args in commands(block.code):
        assert name in KNOWN or not block.runs, f"{name}: check it here, or say that it is not run"
        if name in KNOWN:
            KNOWN[name](args)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_our_commands_parse_wherever_they_stand(page):
    fenced = [block.code for block in blocks(page) if block.language == "console"]
    indented = OUTSIDE_OF_BLOCKS.findall(page.read_text())
    for name, *args in [words for code in [*fenced, *indented] for words in commands(code)]:
        if name == "outergrad":
            parse(args)


# -- programs -------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Programs are started by torchrun; here their sites are threads, in an empty folder."""
    here, distribute, rank_of = threading.local(), og.distribute, dist.get_rank
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda *of: rank_of(*of) if of else here.rank)
    monkeypatch.setattr(
        og, "distribute", lambda *args, **kw: distribute(*args, group=here.group, **kw)
    )

    def run(code: list[str], names) -> list[dict]:
        def body(rank, group):
            here.rank, here.group = rank, group
            found = names(code)
            for part in code:
                exec(compile(part, "page", "exec"), found)
            found["session"].detach()
            return found

        return run_on_lasting_groups(2, body)

    return run


def a_training(code: list[str]) -> dict:
    """What programs of the pages take for granted: a loop's names, and mostly a session."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = [(torch.randn(8, 6), torch.randint(0, 3, (8,))) for _ in range(5)]
    found = {
        "og": og,
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "steps": 3,
    }
    found |= {"loss_fn": nn.CrossEntropyLoss(), "x": loader[0][0], "y": loader[0][1]}
    found["schedule"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
    if "og.distribute(" not in code[0]:
        found["session"] = og.distribute(model)
    return found


@pytest.mark.parametrize("block", PROGRAMS, ids=place)
def test_a_program_of_the_users_pages_runs(block, ranks):
    first, second = ranks([block.code], a_training)
    for ours, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert ours.equal(theirs)


@pytest.mark.slow
def test_the_tutorial_trains_records_saves_and_goes_on(ranks, capsys):
    code = [block.code for block in blocks(TUTORIAL) if block.language == "python"]
    (lasting,) = (k for k, part in enumerate(code) if "og.Checkpoints(" in part)
    assert "steps = 20_000\n" in code[lasting]
    code[lasting] = code[lasting].replace("steps = 20_000", "steps = 200")
    first, second = ranks(code, lambda _: {})
    for ours, theirs in zip(first["model"].parameters(), second["model"].parameters(), strict=True):
        assert ours.equal(theirs)
    assert sum(first["losses"][-20:]) < 0.9 * sum(first["losses"][:20])
    assert not first["x_all"].equal(second["x_all"])
    assert len(list(Path("runs/first").glob("site-*.jsonl"))) == 2
    assert list(Path("checkpoints").glob("step-00000200-of-2-*/site-1.pt"))
    capsys.readouterr()
    again = code[lasting].replace("steps = 200", "steps = 300")
    ranks([again], lambda _: {})
    said = capsys.readouterr().out
    assert "site 1 begins after step 200\n" in said
    assert "step 300: loss" in said
    assert "step 200: loss" not in said
