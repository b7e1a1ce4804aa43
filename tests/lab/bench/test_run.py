"""What a run decides and says before it starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outergrad.launch.links import parse_link
from outergrad.launch.machine import describe
from outergrad_lab.bench import run as module
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.run import COPIES, count_parameters, fits, notes
from outergrad_lab.workloads import WORKLOADS

SHAPED, LOOPBACK = [parse_link("10mbit")], [parse_link("10mbit"), parse_link("loopback")]
NOTES = {
    "enough cores": (8, Plan(sites=4, threads=2), SHAPED, []),
    "one thread too many": (7, Plan(sites=4, threads=2), SHAPED, ["4 sites with 2 threads each"]),
    "too few cores": (3, Plan(sites=4), SHAPED, ["4 sites with 1 thread each share 3 cores"]),
    "loopback": (8, Plan(), LOOPBACK, ["loopback is not shaped"]),
    "both": (1, Plan(), LOOPBACK, ["share 1 core", "loopback"]),
}


@pytest.mark.parametrize(("cores", "plan", "links", "said"), NOTES.values(), ids=NOTES)
def test_what_makes_figures_doubtful_is_said_in_a_line(monkeypatch, cores, plan, links, said):
    monkeypatch.setattr(module, "cores", lambda: cores)
    lines = notes(plan, links)
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line
        assert "\n" not in line


@pytest.mark.parametrize("workload", WORKLOADS)
def test_parameters_are_counted_as_they_are(workload):
    plan = Plan(workload=workload)
    real = sum(parameter.numel() for parameter in plan.recipe.build().parameters())
    assert count_parameters(plan) == real


@pytest.mark.parametrize(("spare", "keep"), [(1, True), (-1, False)])
def test_memory_decides_whether_all_models_are_held_at_once(monkeypatch, spare, keep):
    plan = Plan(sites=4, methods=("ddp", "dad"))
    needed = 4 * 1000 * COPIES * 2 * 4
    free = SimpleNamespace(available=2 * needed + spare)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: free)
    assert fits(plan, 1000) is keep


def test_on_the_way_to_a_loss_all_models_are_held(monkeypatch):
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert fits(Plan(until_loss=0.5), 10**9)


def test_a_run_can_be_repeated_from_what_is_kept():
    about = describe(["/opt/bin/outergrad", "bench", "--out", "my folder"])
    assert about["command"] == "outergrad bench --out 'my folder'"
    assert set(about["versions"]) == {"outergrad", "torch", "numpy", "python"}
    assert about["machine"]["cores"] >= 1
    assert about["machine"]["memory_bytes"] > 0
    assert {"date", "commit"} < set(about)
