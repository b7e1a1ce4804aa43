"""``outergrad audit`` as a user meets it."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
from typer.testing import CliRunner

from outergrad.tools.commands.app import app
from places import REPOSITORY

MINE = textwrap.dedent("""
    import torch
    from torch import nn

    def small(rows):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
        return model, torch.randn(rows, 20), torch.randint(4, (rows,))

    def normed(rows):
        model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
        return model, torch.randn(rows, 20), torch.randint(4, (rows,))

    def unlabelled(rows):
        return nn.Linear(20, 4), torch.randn(rows, 20)
""")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "audited_models.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_a_model_of_ones_own_is_audited(mine):
    about = (
        "--model",
        "audited_models:small",
        "--rows",
        "1,4",
        "--methods",
        "dense,dad-activations",
    )
    result = run(*about, "--json", "found.json", "-o", "found.html")
    assert result.exit_code == 0, result.output
    assert "rows by division" in result.output
    assert "dense: 4 of 4 rows" in result.output
    page = (mine / "found.html").read_text()
    assert page.count('alt="a true row"') == page.count('alt="what came back"') > 0
    assert "<script" not in page
    told = json.loads((mine / "found.json").read_text())
    assert {(one["method"], one["rows"], one["observer"]) for one in told} >= {
        ("dense", 1, "a part"),
        ("dense", 4, "a sum of 2"),
        ("dad-activations", 4, "a part"),
    }


def test_the_model_of_the_page_is_audited(mine):
    page = (REPOSITORY / "docs" / "audit.md").read_text()
    code, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (mine / "audited_people.py").write_text(code)
    result = run("--model", "audited_people:people", "--rows", "2", "--methods", "dad-activations")
    assert result.exit_code == 0, result.output
    assert "dad-activations: 2 of 2 rows" in result.output


def test_a_method_that_does_not_fit_is_told_and_the_others_go_on(mine):
    result = run("--model", "audited_models:normed", "--rows", "4", "--methods", "dense@8,dense")
    assert result.exit_code == 0, result.output
    assert "dense@8 was refused" in result.output
    assert "dense@8: does not go with this model." in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rows", "0"), "--rows"),
        (("--rows", "many"), "--rows many"),
        (("--methods", "dance"), "--methods"),
        (("--methods", "dense@0"), "a number above 0"),
        (("--methods", "dense@"), "a number above 0"),
        (("--out", "nowhere/page.html"), "there is no folder"),
        (("--model", "nothing"), "--model"),
        (("--positions", "0"), "--positions"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, told):
    result = run(*arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_a_model_without_labels_is_refused(mine):
    result = run("--model", "audited_models:unlabelled", "--rows", "2", "--methods", "dense")
    assert result.exit_code == 2
    assert "(model, inputs, labels)" in " ".join(result.output.split())
