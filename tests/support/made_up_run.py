"""Runs that no training wrote, for what reads them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from outergrad.core.run_figures import Watched
from outergrad.events import Disclosure, Evaluation, Event, Layer, Run, Scalars, Step
from outergrad.record.evaluation import evaluated
from outergrad.record.jsonl import JSONL

SHAPES = {
    "encoder.0.weight": (64, 32),
    "encoder.0.bias": (64,),
    "encoder.2.weight": (64, 64),
    "encoder.2.bias": (64,),
    "head.weight": (10, 64),
    "head.bias": (10,),
}
TRAVELS = {"encoder.0.weight": "low rank", "encoder.2.weight": "factors", "head.weight": "dense"}
MACHINE = "Linux x86_64, 2 cores, 1 thread of PyTorch"
START = 1.7e9
DENSE_BYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())


HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")


def write_run(
    folder: Path, *, sites: int = 2, steps: int = 200, every: int = 10, start: float = 1.7e9
) -> Path:
    """A run of three layers: their ranks fall, the loss falls, and the sites come to agree."""
    for rank in range(sites):
        recorder = JSONL(folder, every=every)
        for event in events(rank, sites, steps, every, start):
            recorder.record(event)
        recorder.close()
    return folder


def events(rank: int, sites: int, steps: int, every: int, start: float) -> list[Event]:
    versions = {"outergrad": "0.1.0", "torch": "2.13.0", "machine": MACHINE}
    about = {"method": "RankDAD(rank=4)", "shapes": SHAPES, "dense_bytes": DENSE_BYTES}
    found: list[Event] = [Run(rank=rank, sites=sites, step=0, time=start, **about, **versions)]
    for step in range(steps):
        if step % every == 0:
            found += [layer(rank, sites, step, name) for name in TRAVELS]
            found.append(whole(rank, step, every, start))
        values = {"loss": 2.3 * math.exp(-step / 80) + 0.01 * rank}
        found.append(Scalars(rank=rank, step=step + 1, time=start + step / 10, values=values))
        if step % 50 == 49:
            accuracy = {"accuracy": 1 - math.exp(-step / 80)}
            found.append(Scalars(rank=rank, step=step + 1, time=start + step / 10, values=accuracy))
    return found


def layer(rank: int, sites: int, step: int, name: str) -> Layer:
    travels = TRAVELS[name]
    decay = 0.5 + step / 400
    sigma = tuple(math.exp(-decay * k) * 3 for k in range(16))
    share = [s / sum(sigma) for s in sigma]
    norm = math.sqrt(sum(s * s for s in sigma))
    dense = travels == "dense"
    sent = 5120 if dense else 4 * 4 * sum(SHAPES[name])
    return Layer(
        rank=rank,
        step=step,
        layer=name,
        travels=travels,
        rows=0 if dense else 32,
        kept_rows=0 if dense else 4,
        sent_bytes=sent,
        received_bytes=sent * (sites - 1),
        compress_s=0.0 if dense else 2e-4,
        replay_s=0.0,
        wait_s=3e-3,
        effective_rank=math.exp(-sum(s * math.log(s) for s in share)),
        singular_values=sigma,
        relative_error=0.2 if travels == "low rank" else 0.0,
        residual_norm=0.2 * norm if travels == "low rank" else None,
        activation_norm=None if dense else 10.0,
        delta_norm=None if dense else 0.5,
        gradient_norm=norm * 1.2,
        mean_norm=norm,
        cosine=1 - math.exp(-step / 100) * 0.5 * (rank + 1) / sites,
        duplicates=None if dense else 0.25,
        samples=0 if dense else 16,
        sample_norm=None if dense else 0.1,
        outliers=(7,) if rank and travels == "factors" else (),
        outlier_norms=(0.1 * (4 + step / 100),) if rank and travels == "factors" else None,
        rank_bound=float(min(64, *SHAPES[name])),
        **({} if dense else by_group(sigma)),
        unmeasured={"duplicates": "single sites' rows do not arrive"} if dense else None,
    )


def by_group(sigma: tuple[float, ...]) -> dict[str, Any]:
    """Values of two groups, of which one adds three times as much."""
    shares = {"ill": 0.75, "well": 0.25}
    values = {label: tuple(share * s for s in sigma) for label, share in shares.items()}
    kinds = ("group_gradient", "group_activations", "group_deltas")
    return {"group_rows": {"ill": 8, "well": 24}, **dict.fromkeys(kinds, values)}


def whole(rank: int, step: int, every: int, start: float) -> Step:
    return Step(
        rank=rank,
        step=step,
        time=start + step / 10,
        seconds=0.1 if step else None,
        sent_bytes=9_000,
        received_bytes=9_000,
        total_sent_bytes=30_000 + 9_000 * (step + 1),
        compress_s=4e-4,
        replay_s=0.0,
        wait_s=9e-3,
        noise_batches=2.5,
    )


def watched(sites: int = 2, steps: int = 200, silent: dict[int, int] | None = None) -> Watched:
    """A run while it goes on; the sites that fell silent did so after so many steps."""
    run = Watched()
    for rank in range(sites):
        count = (silent or {}).get(rank, steps)
        for event in events(rank, sites, count, 10, START):
            run.take(event, heard=START + count / 10)
    return run


def write_hospitals(folder: Path, *, method: str = "RankDAD(rank=4)", better: float = 0.0) -> Path:
    """A run of three sites with names, which evaluate the model on rows of their own."""
    for rank, name in enumerate(HOSPITALS):
        recorder = JSONL(folder)
        for event in events(rank, 3, 200, 10, START):
            if isinstance(event, Run):
                event = replace(event, name=name, took_part=HOSPITALS, method=method, **ABOUT)
            recorder.record(event)
            if isinstance(event, Step) and event.step == 0:
                learn = {n: (how, "this site's gradient") for n, how in TRAVELS.items()}
                recorder.record(Disclosure(rank=rank, step=0, time=START, learn=learn))
            if isinstance(event, Scalars) and event.step % 50 == 0 and "loss" in event.values:
                recorder.record(evaluation(rank, event.step, better))
        recorder.close()
    return folder


ABOUT = {
    "transport": "a hub at hub.example.org:8443, over mutual TLS; the hub could read what passes",
    "transform": "",
    "buffers": {"norm.running_mean": "broadcast", "norm.running_var": "broadcast"},
    "model": "lungs.Net",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "python": "3.11.7",
}


def evaluation(rank: int, step: int, better: float = 0.0) -> Evaluation:
    """Figures that grow with the steps, of a site with the fewer rows the higher its rank."""
    rows = 400 // (rank + 1) ** 2
    r = np.random.default_rng(100 * rank)
    y = (r.random(rows) < 0.3 + 0.15 * rank).astype(int)
    seen = r.normal(size=rows)
    p, alone = (_probabilities(y, seen, apart) for apart in (1 + step / 100 + better, 1.2))
    fields = evaluated(y, p, alone, ("healthy", "pneumonia"))
    return Evaluation(rank=rank, step=step, time=START + step / 10, **fields)


def _probabilities(y: np.ndarray, seen: np.ndarray, apart: float) -> np.ndarray:
    return 1 / (1 + np.exp(-apart * (seen + apart * (y - 0.5))))
