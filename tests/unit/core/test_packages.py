"""Missing packages are named with a command that works: outergrad itself is on no index."""

from __future__ import annotations

import re

import pytest

from outergrad.core import packages
from outergrad.core.packages import REQUIREMENTS, how_to_install, missing, require
from places import REPOSITORY

NO_INDEX = re.compile(r"pip install [^`\n]*\boutergrad\b(?!-)")
"""outergrad by its name; `./outergrad-0.1.0-….whl` is a file."""


def test_requirements_are_those_of_the_extras():
    extras = (REPOSITORY / "pyproject.toml").read_text()
    assert all(f'"{requirement}"' in extras for requirement in REQUIREMENTS.values())


def test_what_is_missing_comes_with_the_command_for_it_alone(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name == "grpc")
    told = "cryptography not found: pip install 'cryptography>=42'"
    assert missing("grpc", "cryptography") == told
    assert missing("grpc") is None
    with pytest.raises(ImportError, match=re.escape(told)):
        require("grpc", "cryptography")


def test_modules_are_installed_by_the_names_of_their_packages():
    assert how_to_install("sklearn", "yaml") == "pip install 'scikit-learn>=1.4' 'pyyaml>=6'"


@pytest.mark.parametrize("folder", ["src", "deploy", "examples"])
def test_nothing_sends_users_to_an_index_that_lacks_outergrad(folder):
    files = [f for f in (REPOSITORY / folder).rglob("*") if f.suffix != ".pyc" and f.is_file()]
    assert not [f.name for f in files if NO_INDEX.search(f.read_text(errors="ignore"))]
