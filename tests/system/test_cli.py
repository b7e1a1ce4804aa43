"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from forked import forked_processes
from outergrad.tools.commands.app import app
from outergrad.tools.named_methods.attach import METHODS
from outergrad_lab.commands import data
from outergrad_lab.data import SOURCES, folder_of
from outergrad_lab.models import MODELS
from outergrad_lab.training.split import SPLITS
from places import REPOSITORY

COMMAND = [sys.executable, "-m", "outergrad"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
QUICK = ["--epochs", "2", "--widths", "64", "--lr", "0.003", "--split", "class"]


def invoke(*args: str):
    return CliRunner().invoke(app, args)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)


MISTAKES = {
    "method": (
        ["--method", "magic"],
        "--method must be one of pooled, alone, ddp, ",
    ),
    "widths": (["--widths", "64,64"], "--widths must look like 512-512"),
    "width": (["--widths", "64-0"], "--widths must be above 0"),
    "model": (["--model", "vit"], "--model vit needs images, but the data has rows of 64 numbers"),
    "epochs": (["--epochs", "0"], "--epochs must be above 0"),
    "data": (["--data", "mnist", "--data-dir", "nowhere"], "outergrad data get mnist"),
    "manual": (
        ["--data", "cifar10", "--model", "cnn", "--data-dir", "nowhere"],
        "put cifar10_subset.npz into nowhere",
    ),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(args, said):
    result = invoke("train", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("outergrad: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(("local_rank", "lines"), [("0", 1), ("1", 0)])
def test_one_rank_of_torchrun_tells_a_mistake(monkeypatch, local_rank, lines):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    result = invoke("train", "--sites", "3")
    assert result.exit_code == 2
    assert result.stderr.count("torchrun started 8") == result.stderr.count("\n") == lines


def test_help_by_its_short_name():
    result = invoke("-h")
    assert result.exit_code == 0
    assert "Distributed auto-differentiation" in result.output


def test_version_names_what_a_report_of_an_error_needs():
    said = invoke("--version").output.split()
    assert said[0::2] == ["outergrad", "torch", "Python"]


@pytest.mark.parametrize("asked", ["-h", "--version"])
def test_help_and_version_import_no_torch(asked):
    code = f"import sys; sys.modules['torch'] = None; sys.argv[1:] = [{asked!r}]; "
    code += "from outergrad.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "outergrad" in ended.stdout


def test_a_command_that_is_not_imported_has_the_help_of_one_that_is():
    command = typer.main.get_command(app)
    with command.make_context("outergrad", ["train"]) as context:
        for name in command.list_commands(context):
            known = command.get_command(context, name).help
            _, imported, _ = command.resolve_command(context, [name])
            assert known
            assert known == imported.help.replace("\n\x08", "")


def test_help_names_every_choice():
    text = " ".join(invoke("train", "--help").stdout.split())
    assert all(name in text for name in (*SOURCES, *MODELS, *METHODS, *SPLITS))


def test_data_list_says_what_is_there(tmp_path):
    shown = invoke("data", "list", "--data-dir", str(tmp_path)).stdout
    text = " ".join(shown.replace("│", " ").split())
    assert "ready" in text
    assert "outergrad data get mnist" in text
    assert "outergrad data get natops" in text
    assert "licence: CC BY 4.0" in text


def test_data_get_of_the_unknown():
    result = invoke("data", "get", "faces")
    assert result.exit_code == 2
    assert "no data set 'faces': there are digits, mnist" in result.stderr


def test_data_get_of_what_needs_no_file():
    result = invoke("data", "get", "digits")
    assert result.exit_code == 0
    assert "digits is ready" in result.stdout


def test_data_get_of_what_cannot_be_reached(tmp_path):
    nobody = ("--url", "http://127.0.0.1:9/")
    result = invoke("data", "get", "natops", "--data-dir", str(tmp_path), *nobody)
    assert result.exit_code == 2
    assert f"put natops.npz into {tmp_path / 'natops'}" in result.stderr
    assert result.stderr.count("\n") == 1


def test_data_get_of_what_was_put_there(tmp_path):
    (tmp_path / "natops").mkdir()
    (tmp_path / "natops" / "natops.npz").touch()
    result = invoke("data", "get", "natops", "--data-dir", str(tmp_path))
    assert "natops is ready: 0 files" in result.stdout


@pytest.mark.parametrize("name", ["mnist", "mnist-512", "natops"])
def test_data_get_puts_files_where_train_looks(monkeypatch, tmp_path, name):
    asked = []
    monkeypatch.setattr(data, "download", lambda *args: asked.append(args) or ["a file"])
    monkeypatch.setenv("OUTERGRAD_DATA", str(tmp_path))
    assert invoke("data", "get", name, "--url", "http://mirror/").exit_code == 0
    (source, folder, _, url) = asked[0]
    assert (source, folder, url) == (SOURCES[name], folder_of(name, tmp_path), "http://mirror/")
    assert str(folder) in invoke("train", "--data", name).stderr


@pytest.mark.slow
def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['rich'] = None; from outergrad.cli import main; main()"
    result = run(sys.executable, "-c", code)
    assert result.returncode == 1
    assert result.stderr == "outergrad: rich not found: pip install 'rich>=13'\n"


def losses(log: Path) -> list[float]:
    """The epochs' losses in a log."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert events[0]["epochs"] == len(events) - 1
    return [event["loss"] for event in events[1:]]


@pytest.mark.slow
def test_dad_follows_pooled(tmp_path):
    """The first as a program, the second in this process, from which its sites are forked."""
    args = {
        m: ["train", "--method", m, *QUICK, "--log", str(tmp_path / m)] for m in ("pooled", "dad")
    }
    pooled = run(*COMMAND, *args["pooled"])
    assert pooled.returncode == 0, pooled.stderr
    with forked_processes(tmp_path / "shown"):
        dad = invoke(*args["dad"])
    assert dad.exit_code == 0, dad.stderr
    shown = {"pooled": pooled.stdout, "dad": (tmp_path / "shown").read_text()}
    found = {method: losses(tmp_path / method) for method in shown}
    assert found["dad"] == pytest.approx(found["pooled"], abs=1e-4)
    assert "0 B per step and site" in shown["pooled"]
    assert "0 B per step and site" not in shown["dad"]


@pytest.mark.slow
def test_under_torchrun_one_site_talks():
    result = run(*TORCHRUN, "-m", "outergrad", "train", "--method", "dense", *QUICK, "--verbose")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("test accuracy") == 1
    assert result.stdout.count("0.weight") == 1


@pytest.mark.slow
def test_under_torchrun_a_mistake_is_told_once(tmp_path):
    result = run(*TORCHRUN, "-m", "outergrad", "train", "--data", "mnist", "--data-dir", "nowhere")
    assert result.returncode != 0
    assert result.stderr.count("outergrad: mnist is not there") == 1


@pytest.mark.slow
def test_the_example_learns_under_torchrun():
    result = run(*TORCHRUN, str(REPOSITORY / "examples" / "train.py"))
    assert result.returncode == 0, result.stderr
    last = result.stdout.splitlines()[-1]
    assert float(last.split("test accuracy ")[1].split("%")[0]) > 90


@pytest.fixture
def long_training(tmp_path):
    """A training under way that would take hours, and its processes."""
    log = tmp_path / "log"
    command = [*COMMAND, "train", "--epochs", "100000", "--widths", "64", "--log", str(log)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A test run in the background ignores interrupts, and so would what it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    options = {"text": True, "start_new_session": True, "preexec_fn": heed, **pipes}
    with subprocess.Popen(command, **options) as process:
        try:
            while not log.exists() or log.read_text().count("\n") < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            yield process, psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()


def ended(children: list[psutil.Process]) -> bool:
    """Whether all of them end within seconds."""
    return not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.slow
def test_an_interrupt_ends_every_process_quietly(long_training):
    process, children = long_training
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert ended(children)
    assert "Traceback" not in stdout + stderr


@pytest.mark.slow
def test_a_killed_command_leaves_no_process(long_training):
    process, children = long_training
    process.kill()
    assert ended(children)


@pytest.mark.slow
def test_a_killed_site_is_told_once(long_training):
    process, children = long_training
    sites = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    sites[1].kill()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert ended(children)
    assert "outergrad: site 1 was ended by SIGKILL" in stderr
    assert "Traceback" not in stderr
