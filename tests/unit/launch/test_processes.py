"""Processes that fail: the cause is told, and none is left."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from forked import forked_processes
from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.processes import Failure, lost_of, run_processes

pytestmark = pytest.mark.slow


def sleep_long(pid_file: Path) -> None:
    pid_file.write_text(str(os.getpid()))
    time.sleep(600)


def fail_when_another_sleeps(pid_file: Path, error: Exception | None) -> None:
    """Raises the error, or ends itself at once."""
    while not pid_file.exists():
        time.sleep(0.01)
    if error:
        raise error
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES = {
    "mistake": (RecipeError("--lr is odd"), RecipeError, r"^--lr is odd$"),
    "error": (
        ZeroDivisionError("by\nnought"),
        SiteError,
        r"^site 1: ZeroDivisionError: by nought$",
    ),
    "signal": (None, SiteError, r"^site 1 was ended by SIGKILL$"),
}


@pytest.mark.parametrize(("error", "kind", "said"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_told_and_ends_the_others(tmp_path, error, kind, said):
    pid_file = tmp_path / "pid"
    works = [
        partial(sleep_long, pid_file),
        partial(fail_when_another_sleeps, pid_file, error),
    ]
    with forked_processes(), pytest.raises(kind, match=said) as raised:
        run_processes(works)
    assert getattr(raised.value, "lost", set()) == ({1} if error is None else set())
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_who_is_aborted_because_another_is_gone_is_not_lost():
    told = Failure(1.0, SiteError("site 0: lost the others"))
    killed, aborted = (Failure(0.0, SiteError(""), -n) for n in (signal.SIGKILL, signal.SIGABRT))
    assert lost_of({0: told, 1: killed, 2: aborted}) == {1}
    assert lost_of({0: told, 2: aborted}) == {2}
    assert lost_of({0: told}) == set()


def test_results_come_in_order():
    works = [partial(sleep_and_return, 0.3, "slow"), partial(sleep_and_return, 0.0, "fast")]
    assert run_processes(works) == ["slow", "fast"]


def sleep_and_return(seconds: float, value: str) -> str:
    time.sleep(seconds)
    return value


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    raise ConnectionError("the other is gone")


def touch_and_fail(path: Path) -> None:
    path.touch()
    raise MemoryError("the cause")


def test_the_first_failure_in_time_is_told_with_its_traceback(tmp_path):
    works = [partial(wait_for, tmp_path / "failed"), partial(touch_and_fail, tmp_path / "failed")]
    told = r"(?s)site 1: Traceback .*touch_and_fail.*the cause"
    with forked_processes(), pytest.raises(SiteError, match=told):
        run_processes(works, verbose=True)
