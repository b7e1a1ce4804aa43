"""``outergrad audit`` as a user meets it."""

from __future__ import annotations

import json
import re
import stat
import textwrap

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import outergrad as og
from outergrad.tools.commands.app import app
from places import REPOSITORY
from ranks import run_on_lasting_groups

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

    def others(rows):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
        return model, torch.randn(rows, 20), torch.randint(4, (rows,))

    def wider(rows):
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        return model, torch.randn(rows, 20), torch.randint(4, (rows,))

    def the_same(rows):
        model, _, _ = small(rows)
        return model, torch.ones(rows, 20), torch.zeros(rows, dtype=torch.long)

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
    for name in ("found.html", "found.json"):  # they show rows and texts
        assert stat.S_IMODE((mine / name).stat().st_mode) == 0o600
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


# -- a training of one's own ----------------------------------------------------------------------


def train(path, method, steps=1, *, told=True, ones=False, rows=4):
    """A loop of a user's own, of which the first site keeps what it sends."""

    def body(rank, group):
        torch.manual_seed(0)  # which rank 0 draws is what all get
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
        tap = og.FileTap(path, steps=3) if rank == 0 else None
        session = og.distribute(model, method, group=group, tap=tap)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for step in range(steps):
            drawn = torch.Generator().manual_seed(100 + 10 * rank + step)
            x = torch.ones(rows, 20) if ones else torch.randn(rows, 20, generator=drawn)
            y = torch.randint(4, (rows,), generator=drawn)
            if told and tap is not None:
                tap.truth(x, y)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.detach()

    run_on_lasting_groups(2, body)


def test_recorded_steps_are_attacked_with_the_weights_and_rows_that_they_had(mine):
    train(mine / "sent.pt", og.Dense(), steps=2)
    about = ("--model", "audited_models:others", "--recorded", "sent.pt")
    result = run(*about, "--json", "found.json", "-o", "found.html")
    assert result.exit_code == 0, result.output
    assert "Attacked: recorded rows." in result.output
    told = json.loads((mine / "found.json").read_text())
    seen = {(one["method"], one["observer"]): one for one in told}
    assert len(seen) == 4
    for step in range(2):
        part = seen[f"{og.Dense()!r}, step {step}", "a part"]
        assert part["rows"] == 4
        found = {one["attack"]: one for one in part["findings"]}
        assert (found["rows by SPEAR"]["exact"], found["rows by SPEAR"]["false"]) == (4, 0)
        assert (found["labels"]["found"], found["members by the span"]["false"]) == (4, 0)
        hidden = seen[f"{og.Dense()!r}, step {step}", "masked"]
        assert {one["attack"]: one["found"] for one in hidden["findings"]}["rows by SPEAR"] == 0


def test_recorded_local_steps_are_attacked_as_the_gradients_that_they_stand_for(mine):
    train(mine / "sent.pt", og.LocalSteps(1), rows=1)
    about = ("--model", "audited_models:others", "--recorded", "sent.pt")
    refused = run(*about)
    assert refused.exit_code == 2
    assert "--lr" in refused.output
    result = run(*about, "--lr", "0.02", "--json", "found.json")
    assert result.exit_code == 0, result.output
    part, *_ = json.loads((mine / "found.json").read_text())
    found = {one["attack"]: one for one in part["findings"]}
    assert (found["rows by division"]["found"], found["labels"]["found"]) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--recorded", "nothing.pt"), "no such file"),
        (("--recorded", "audited_models.py"), "--recorded"),
        (("--recorded", "sent.pt", "--model", "audited_models:wider"), "of another model"),
        (("--recorded", "sent.pt", "--model", "mlp"), "of another model"),
        (("--recorded", "sent.pt", "--methods", "dad"), "--methods does not go"),
        (("--recorded", "sent.pt", "--rows", "1"), "--rows does not go"),
        (("--recorded", "sent.pt", "--positions", "3"), "--positions does not go"),
        (("--recorded", "sent.pt", "--lr", "0"), "--lr"),
        (("--lr", "0.1"), "--lr is for --recorded"),
        (("--recorded", "untold.pt"), "call tap.truth(x, y)"),
        (("--recorded", "ones.pt", "--model", "audited_models:the_same"), "makes the rows of the"),
    ],
)
def test_mistakes_with_recorded_steps_are_told_in_a_line(mine, arguments, told):
    train(mine / "sent.pt", og.Dense())
    train(mine / "untold.pt", og.Dense(), told=False)
    train(mine / "ones.pt", og.Dense(), ones=True)
    result = run("--model", "audited_models:others", *arguments)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())


def changed(path, **told):
    """Saves the file of a training with other values; those of `sent` are of its first message."""
    found = torch.load(path, weights_only=True)
    step = found["steps"][0]
    for places in (found, step, step["sent"][0]):
        places.update({name: told.pop(name) for name in [*told] if name in places})
    step["sent"][0]["slot"].update(told)
    torch.save(found, path)


def test_names_from_a_file_reach_no_terminal_as_they_are(mine):
    train(mine / "sent.pt", og.DAD(always=True))
    changed(mine / "sent.pt", method="[/x]\x1b]0;title\x07", transform="[bold]")
    result = run("--model", "audited_models:others", "--recorded", "sent.pt", "-o", "found.html")
    assert result.exit_code == 0, result.output
    assert "[/x]" in result.output
    assert "[bold]" in result.output
    assert "\x1b]" not in result.output


def test_a_step_in_which_nothing_was_sent_gives_nothing_back(mine):
    train(mine / "sent.pt", og.DAD(always=True))
    found = torch.load("sent.pt", weights_only=True)
    found["steps"][0]["sent"] = []
    torch.save(found, "sent.pt")
    result = run("--model", "audited_models:others", "--recorded", "sent.pt")
    assert result.exit_code == 0, result.output
    assert "nothing came back" in result.output


HUGE = torch.ones(1).expand(1, 1 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"local_steps": "4"}, "str in place of int"),
        ({"step": "[/x]"}, "str in place of int"),
        ({"weights": [1]}, "list in place of dict"),
        ({"truth": ["ab"]}, "str in place of Tensor"),
        ({"truth": [[torch.ones(3, 20), torch.ones(2)]]}, "not as many labels as rows"),
        ({"truth": [[torch.ones(2, 20), torch.tensor([0, 4])]]}, "does not take"),
        ({"content": [1, 2, 3]}, "int in place of Tensor"),
        ({"content": [HUGE, HUGE, None]}, "without all of its numbers"),
        ({"content": [torch.ones(1, 2, 7), torch.ones(1, 2, 9), None]}, "do not fit the model"),
        ({"weight": "elsewhere"}, "do not fit the model"),
    ],
)
def test_damaged_files_are_told_in_a_line(mine, told, why):
    train(mine / "sent.pt", og.DAD(always=True))
    changed(mine / "sent.pt", **told)
    result = run("--model", "audited_models:others", "--recorded", "sent.pt")
    assert result.exit_code == 2, result.output
    assert why in " ".join(result.output.split())


# -- real rows ------------------------------------------------------------------------------------


def test_it_says_which_rows_it_has(mine):
    about = ("--model", "audited_models:small", "--rows", "1", "--methods", "dense")
    assert "Attacked: rows of its own." in run(*about).output


def test_the_loop_of_the_page_is_recorded_and_audited(mine):
    page = (REPOSITORY / "docs" / "audit.md").read_text()
    code, loop, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (mine / "audited_loop.py").write_text(code)
    assert "og.DAD(), tap=tap)" in loop
    loop = loop.replace("og.DAD(), ", "og.DAD(), group=group, ").replace("100", "1")

    def body(rank, group):
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        drawn = torch.Generator().manual_seed(rank)
        rows = torch.randn(2, 3, 20, generator=drawn), torch.randint(2, (2, 3), generator=drawn)
        about = {"og": og, "model": model, "group": group, "loader": [*zip(*rows, strict=True)]}
        about["loss_fn"] = nn.functional.cross_entropy
        about["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        exec(loop.replace("sent.pt", f"sent-{rank}.pt"), about)
        about["session"].detach()

    run_on_lasting_groups(2, body)
    result = run("--recorded", "sent-0.pt", "--model", "audited_loop:people")
    assert result.exit_code == 0, result.output
    assert "3 of 3 rows" in result.output
