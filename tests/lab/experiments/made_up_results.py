"""Results of tasks that nobody ran."""

from __future__ import annotations

import math
import random

ABOUT = {
    "outergrad": "0.9.0",
    "torch": "2.13.0",
    "machine": "2 cores of a made-up CPU",
    "finished": "2026-02-03T04:05:06",
}


def training(losses=(2.0, 1.0), *, tests=None, by_site=None, layers=None, **settings):
    """A training of so many steps; its last test is half the last loss."""
    usual = {"data": "mnist", "model": "mlp", "method": "dad", "sites": 2, "seed": 0}
    last = {"step": len(losses), "loss": losses[-1] / 2, "accuracy": 0.9, "auc": None}
    last |= {"sent_bytes": 1000 * len(losses), "sites": by_site}
    return {
        "kind": "training",
        "settings": usual | settings,
        "losses": list(losses),
        "tests": tests if tests is not None else [last],
        "layers": layers,
        "seconds": 10.0,
        "parameters": 1000,
        **ABOUT,
    }


def a_test(step, sent_bytes, loss=0.5, accuracy=0.9):
    """A test after so many steps."""
    found = {"step": step, "loss": loss, "accuracy": accuracy, "auc": None}
    return found | {"sent_bytes": sent_bytes, "sites": None}


def timing(steps=None, **settings):
    """Step times in seconds and bytes by method."""
    usual = {"workload": "mlp", "sites": 2, "link": "100mbit", "rtt": 0.0}
    steps = steps or {"ddp": (0.1, 8000), "dad": (0.05, 2000)}
    found = {
        m: {"step_s": s, "quartiles_s": [s, s], "sent_bytes": b} for m, (s, b) in steps.items()
    }
    settings = usual | settings | {"methods": list(steps)}
    return {"kind": "timing", "settings": settings, "steps": found, "seconds": 5.0, **ABOUT}


def of_sites(method, sites, sent_bytes, step_s):
    """What a method sends at so many sites."""
    settings = {"workload": "mlp", "sites": sites, "link": "1gbit", "latency": 0}
    settings["methods"] = [method]
    found = {"sent_bytes": sent_bytes, "step_s": step_s, "compute_s": step_s / 2}
    steps = {method: found}
    return {"kind": "sites", "settings": settings, "steps": steps, "seconds": 2.0, **ABOUT}


def iterations(*rows):
    """Rows of layer, rank, iterations and error."""
    found = [
        {"layer": layer, "rank": rank, "iterations": n, "tolerance": None, "error": error}
        | {"best_error": 0.1, "ratio": error / 0.1, "kept_rank": rank, "ms": 0.2 * n}
        for layer, rank, n, error in rows
    ]
    settings = {"data": "mnist", "model": "mlp"}
    return {"kind": "iterations", "settings": settings, "rows": found, "seconds": 1.0, **ABOUT}


def plausible(method, end, *, steps=600, sent=1000, noise=0.08, **settings):
    """A training that looks like one."""
    same = ("pooled", "dense", "ddp", "dad", "edad")
    luck = random.Random(f"{settings.get('seed')}{'' if method in same else method}")
    losses = [end + (2.3 - end) * math.exp(-step / 60) for step in range(steps)]
    losses = [max(loss + luck.gauss(0, noise), 0.01) for loss in losses]
    jitter = luck.gauss(0, 0.004)
    tests = []
    for step in range(steps // 6, steps + 1, steps // 6):
        accuracy = 1 - (end + (0.9 - end) * math.exp(-step / 100)) / 1.7 + jitter
        found = {"step": step, "loss": losses[step - 1], "accuracy": accuracy}
        found |= {"auc": 1 - (1 - accuracy) / 2, "sent_bytes": sent * step}
        sites = [{k: found[k] - s / 100 for k in ("loss", "accuracy", "auc")} for s in range(4)]
        tests.append(found | {"sites": sites})
    return training(losses, tests=tests, method=method, **settings)
