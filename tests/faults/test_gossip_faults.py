"""Gossip among processes that die, stop, are late, lie or are cut off: see gossip_harness.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gossip_judge import judge_gossip
from gossip_trials import STEPS, GossipTrial, draw
from judge import Seen

from covering import LONG

HARNESS = Path(__file__).with_name("gossip_harness.py")
INJECTIONS = 300 if LONG else 20
LIMIT_S = 15.0 * INJECTIONS


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_every_move_has_its_opposite_and_those_that_are_left_train_on():
    """And average by rounds, keep their mean, and end by themselves."""
    seed = os.environ.get("OUTERGRAD_FAULT_SEED", "0")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(HARNESS), "--injections", str(INJECTIONS), "--seed", seed]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
    assert f"{INJECTIONS} faults in" in done.stdout, done.stdout
    print(done.stdout)


# -- the judge itself -----------------------------------------------------------------------------

ABOUT = {"number": 0, "way": "gloo", "graph": "ring", "how": "whole", "sites": 2, "victim": 1}
ABOUT |= {"step": 0, "moment": "before", "index": 0, "pause_s": 0.3, "field": "check"}


def left_behind(folder, kind, *, moves, averaged=(0.0, 0.0), closed="", losses=STEPS, status=0):
    """Judges what two sites leave that start with 1 and -1 and make no steps of their own."""
    seen = []
    for rank, start in enumerate((1.0, -1.0)):
        at, rows = folder / f"0-{rank}", moves[rank]
        np.save(f"{at}-start.npy", [start])
        np.save(f"{at}-own.npy", [0.0])
        np.save(f"{at}-trained.npy", [start + sum(change for _, change in rows)])
        np.save(f"{at}-averaged.npy", [averaged[rank]])
        told = np.array([[1 - rank, *row] for row in rows], dtype=float)
        Path(f"{at}.moves").write_bytes(told.tobytes())
        lines = [
            {"event": "injected"},
            {"event": "trained", "losses": [1.0] * losses, "settled": len(rows)},
            {"event": "averaged", "closed": {str(1 - rank): closed}, "free": [1 - rank]},
            {"event": "ended", "error": "done"},
        ]
        seen.append(Seen(lines, status))
    return judge_gossip(GossipTrial(kind=kind, **ABOUT), folder, seen, hung=False)


def test_a_trial_that_went_well_has_no_complaints(tmp_path):
    both = [[(1, -0.5)], [(1, 0.5)]]
    assert not left_behind(tmp_path, "late", moves=both).complaints


@pytest.mark.parametrize(
    ("kind", "wrong", "told"),
    [
        ("late", {"moves": [[(1, -0.5)], [(1, 0.4)]]}, "are off by"),
        ("late", {"moves": [[(1, -0.5)], []]}, "do not have both of the rounds [1]"),
        ("damage", {"moves": [[(1, -0.5), (2, -0.1)], []]}, "of the rounds [1, 2]"),
        ("damage", {"moves": [[], []]}, "nobody has found the damaged letter"),
        ("late", {"moves": [[], []], "averaged": (0.1, 0.1)}, "has moved their mean by 0.1"),
        ("late", {"moves": [[], []], "averaged": (0.5, -0.5)}, "are 0.5 apart"),
        ("late", {"moves": [[], []], "losses": 3}, "has not trained on"),
        ("late", {"moves": [[], []], "status": -6}, "ended with -6"),
        ("kill", {"moves": [[], []]}, "which was killed, ended with 0"),
    ],
)
def test_the_judge_finds_what_goes_wrong(tmp_path, kind, wrong, told):
    assert any(told in one for one in left_behind(tmp_path, kind, **wrong).complaints)


def test_trials_are_the_same_again_from_the_same_seed():
    assert [draw(n, 5) for n in range(50)] == [draw(n, 5) for n in range(50)]
    assert {draw(n, 5).kind for n in range(50)} == {"kill", "stop", "late", "damage", "cut"}
