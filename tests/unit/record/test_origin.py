"""The commit of a model is read from Git's files, as Git itself would tell it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch import nn

from outergrad.record.origin import commit_at, origin_of

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git")


def git(folder: Path, *args: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *settings, *args], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@needs_git
@pytest.mark.parametrize("how", ["branch", "packed", "detached"])
def test_a_commit_is_that_of_git(repository, how):
    if how == "packed":
        git(repository, "pack-refs", "--all")
    if how == "detached":
        git(repository, "checkout", "-q", "--detach")
    assert commit_at(repository / "models" / "net.py") == git(repository, "rev-parse", "HEAD")


@needs_git
def test_a_further_work_tree_has_its_own(repository, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "tree"
    git(repository, "worktree", "add", "-q", "-b", "second", str(other))
    git(other, "commit", "-qm", "second", "--allow-empty")
    assert commit_at(other / "models" / "net.py") == git(other, "rev-parse", "HEAD")


def test_outside_of_git_it_is_not_known(tmp_path):
    assert commit_at(tmp_path / "net.py") == ""


def test_a_model_has_its_class():
    assert origin_of(nn.Linear(2, 2))["model"] == "torch.nn.modules.linear.Linear"
