"""``outergrad plan --epsilon``: the noise that an ε takes, and who has which ε then."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from outergrad.core import packages
from outergrad.private import CyclicPoisson, Ledger, Poisson, Release, noise_for
from outergrad.tools.commands.app import app

ASKED = ["--epsilon", "3", "--delta", "1e-5", "--epochs", "20", "--samples", "600"]


def invoke(*args: str):
    usual = ["--seconds", "0", "--rows", "6", "--methods", "dad", "--sites", "4"]
    return CliRunner().invoke(app, ["plan", *usual, *args])


def test_noise_and_the_epsilon_of_each_observer_are_told(tmp_path):
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    result = invoke(*ASKED, "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    said = " ".join(result.stdout.split())
    found = json.loads((tmp_path / "plan.json").read_text())["privacy"]
    assert (found["rate"], found["steps"]) == (0.01, 2000)
    assert found["noise"] == noise_for(3.0, 1e-5, 0.01, 2000)
    noise = found["noise"]
    assert f"takes noise of {noise:.3f} clips in the sum of gradients, {noise / 2:.3f} from" in said
    model, masked, seen = (told["pld"] for told in found["epsilons"].values())
    assert 2.98 < model <= 3.0 < masked < seen
    ledger = Ledger(1e-5)
    ledger.record(Release(noise, Poisson(0.01), 4, "open"), 2000)
    assert seen == ledger.epsilon("site")
    for told in found["epsilons"].values():
        assert f"{told['pld']:.2f} {told['rdp']:.2f}" in said
    assert "Of the exact methods dad" in said


MISTAKES = {
    "alone": (["--epsilon", "3"], "a plan of privacy needs --delta and --epochs and --samples"),
    "without": (ASKED[2:], "a plan of privacy needs --epsilon, too"),
    "epsilon": (["--epsilon", "0", *ASKED[2:]], "--epsilon must be above 0 and at most 50, not 0"),
    "delta": ([*ASKED, "--delta", "1"], "--delta must be between 0 and 1, not 1"),
    "epochs": ([*ASKED, "--epochs", "0"], "--epochs must be above 0, not 0"),
    "samples": ([*ASKED, "--samples", "0"], "--samples must be 1 or more, not 0"),
    "bands": ([*ASKED, "--bands", "0"], "--bands must be 1 or more, not 0"),
    "bands alone": (["--bands", "2"], "needs --epsilon and --delta and --epochs and --samples"),
}


@pytest.mark.parametrize(("args", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_before_anything_is_measured(args, said):
    result = invoke(*args)
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]
    assert not result.stdout


def test_noise_in_bands_is_what_its_turns_take(tmp_path):
    """20 epochs at a rate of 1/100 are 250 turns of each of 8 parts, at a rate of 8/100."""
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    result = invoke(*ASKED, "--bands", "8", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    found = json.loads((tmp_path / "plan.json").read_text())["privacy"]
    noise = found["noise"]
    assert noise == noise_for(3.0, 1e-5, CyclicPoisson(0.01, 8), 2000)
    assert noise == pytest.approx(noise_for(3.0, 1e-5, 0.08, 250), abs=1e-3)
    model, _, seen = (told["pld"] for told in found["epsilons"].values())
    assert 2.98 < model <= 3.0
    ledger = Ledger(1e-5)
    ledger.record(Release(noise / 2, Poisson(0.08)), 250)  # of 4 sites
    assert seen == pytest.approx(ledger.epsilon(), abs=1e-9)
    of_one = noise_for(3.0, 1e-5, 0.01, 2000) * math.sqrt(2001 / 2)  # mean of 1 to 2,000 variances
    assert found["noise_in_sums_of_1_band"] == pytest.approx(of_one)
    assert found["noise_in_sums"] < of_one
    assert "2,000 steps of Poisson batches of 8 parts in turn" in said
    assert f"noise of {found['noise_in_sums']:.1f} clips" in said
    assert f"{of_one:.1f} with 1 band" in said


TOO_FEW = {
    "samples": (["--samples", "5"], "--samples 5 is less than the 6 rows of a batch"),
    "bands": (["--bands", "101"], "less than its 6 rows: pass --bands 100 at most"),
    "own": (["--samples", "5", "--rows", "32"], "less than the 32 rows"),
}


@pytest.mark.parametrize(("args", "said"), TOO_FEW.values(), ids=TOO_FEW)
def test_fewer_rows_than_a_batch_are_refused_before_anything_is_measured(args, said, monkeypatch):
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    monkeypatch.setattr("outergrad.tools.commands.plan.forecast", None)
    result = invoke(*ASKED, *args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not result.stdout


def test_a_models_own_batch_is_checked_before_anything_is_measured(monkeypatch):
    pytest.importorskip("dp_accounting", reason="pip install 'dp-accounting>=0.6'")
    monkeypatch.setattr("outergrad.tools.commands.plan.forecast", None)
    result = CliRunner().invoke(app, ["plan", *ASKED, "--samples", "5"])
    assert result.exit_code == 2
    assert "--samples 5 is less than the 32 rows of a batch" in " ".join(result.stderr.split())


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name != "dp_accounting")
    result = invoke(*ASKED)
    assert result.exit_code == 2
    assert "pip install 'dp-accounting>=0.6'" in result.stderr
