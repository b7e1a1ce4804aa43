"""``outergrad watch`` as a user meets it."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from typer.testing import CliRunner

from made_up_run import write_run
from outergrad.tools.commands.app import app

COMMAND = [sys.executable, "-m", "outergrad", "watch"]


def invoke(*args: str):
    return CliRunner().invoke(app, ["watch", *args])


@pytest.mark.parametrize("width", [60, 80, 140])
def test_once(tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    result = invoke(str(write_run(tmp_path / "run")), "--once")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "RankDAD(rank=4)" in lines[0]
    assert lines[0].endswith("● live")  # written a moment ago
    assert sum(line.strip().startswith("encoder") for line in lines) == 2


def nowhere(folder):
    return folder / "nowhere", "there is no folder"


def empty(folder):
    return folder, "no site-*.jsonl in "


def empty_file(folder):
    (folder / "site-0.jsonl").touch()
    return folder, "no event in "


def foreign(folder):
    (folder / "site-0.jsonl").write_text("hello\n")
    return folder, "no event in "


def above(folder):
    write_run(folder / "mlp", steps=20)
    return folder, "there is in "


def a_file(folder):
    run = write_run(folder, steps=20)
    return run / "site-0.jsonl", "is a file: name the folder that it is in"


@pytest.mark.parametrize("made", [nowhere, empty, empty_file, foreign, above, a_file])
def test_where_nothing_is_it_says_so_in_one_line(tmp_path, made):
    path, said = made(tmp_path)
    result = invoke(str(path), "--once")
    assert result.exit_code == 2
    assert result.stderr.startswith("outergrad: ")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_foreign_lines_do_not_matter(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "site-1.jsonl").open("a") as file:
        file.write("Traceback\n{}\nhalf a l")
    result = invoke(str(run), "--once")
    assert result.exit_code == 0
    assert "2 lines that are no events" in result.stdout


class Terminal:
    """A pseudo-terminal and the command in it; ``shown`` is all that it wrote."""

    def __init__(self, *args: str, width: int = 80, height: int = 24):
        self._end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**env, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(inner)
        self.shown = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                self.shown += os.read(self._end, 1 << 16).decode(errors="replace")
            except OSError:  # the command has ended
                return

    def wait_for(self, text: str):
        until = time.monotonic() + 20
        while text not in self.shown:
            assert self.process.poll() is None, self.shown
            assert time.monotonic() < until, self.shown
            time.sleep(0.05)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=30)
        self._reader.join()
        return code

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal(str(tmp_path / "run"))
    yield terminal
    terminal.close()


@pytest.mark.slow
def test_live_from_before_the_first_file_until_ctrl_c(terminal, tmp_path):
    terminal.wait_for("waiting for site-*.jsonl in")
    write_run(tmp_path / "run", steps=20, start=time.time())
    terminal.wait_for("RankDAD(rank=4)")
    assert "● live" in terminal.shown
    write_run(tmp_path / "run", steps=60, start=time.time())
    terminal.wait_for("\x1b[1m60\x1b")
    assert terminal.end(signal.SIGINT) == 0
    _, _, last = terminal.shown.rpartition("\x1b[?1049l")  # back from the alternate screen
    assert "RankDAD(rank=4)" in last
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")
    assert "Traceback" not in terminal.shown
    assert last.count("\n") <= 24


@pytest.mark.slow
def test_a_signal_gives_the_terminal_back(terminal):
    terminal.wait_for("waiting for site-*.jsonl in")
    assert terminal.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert terminal.shown.rindex("\x1b[?25h") > terminal.shown.rindex("\x1b[?25l")
    assert "\x1b[?1049l" in terminal.shown


@pytest.mark.slow
def test_through_a_pipe_it_writes_lines(tmp_path):
    write_run(tmp_path, steps=20, start=time.time())
    heed = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, str(tmp_path)], preexec_fn=heed, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert line.startswith("step 20  loss ")
    assert "\x1b" not in line
    assert (process.returncode, rest, errors) == (0, "", "")
