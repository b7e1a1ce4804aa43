"""What training with og.Private reaches at the same ε, by method, clipping and noise.

    python benchmarks/private_training.py [--epsilon 3] [--steps 300] [--seeds 2] [--only WORDS]

Two sites are threads of this process, each with half of MNIST (in OUTERGRAD_DATA), and train a
784-256-256-10 MLP by SGD with momentum, on 512 samples per step of both sites together. The noise
of each way is the least with which all steps stay within ε at δ = 1e-5, against whoever gets the
model. Of each way the best of a few clips and learning rates is found with one seed, by the loss on
the test set, and its figures are means over other seeds. The search itself is not counted in ε.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import outergrad as og
from outergrad.launch.simulate import simulate
from outergrad_lab.data.catalogue import load

SITES, BATCH, DELTA = 2, 512, 1e-5
CLIPS, RATES = (1.0, 0.3), (0.1, 0.3, 1.0)
ALTERNATE = og.RankDAD(rank=16, reduce="alternate", error_feedback=None)
BLOCKS = og.Sparse(density=0.1, select="random_blocks", error_feedback=False)


class Way(NamedTuple):
    """A method, further settings of `og.Private`, and the parts of which batches are in turn."""

    method: Any
    about: dict[str, Any]
    parts: int = 1


class Found(NamedTuple):
    """Loss and accuracy on the test set, and the bytes that a site sends per step."""

    loss: float
    accuracy: float
    sent_bytes: float


WAYS = {
    "dense": Way(og.Dense(), {}),
    "alternate": Way(ALTERNATE, {}),
    "alternate, sent_only": Way(ALTERNATE, {"sent_only": True}),
    "blocks": Way(BLOCKS, {}),
    "blocks, sent_only": Way(BLOCKS, {"sent_only": True}),
    **{f"dense, {b} bands": Way(og.Dense(), {"bands": b}, b) for b in (4, 16)},
}


def sampler(way: Way, rows: int, rate: float, site: int, steps: int, seed: int) -> Any:
    """Returns the sampler of a way, with the same seeds in each run: for a comparison alone."""
    about: dict[str, Any] = {"site": site, "steps": steps, "seed": seed}
    if way.parts == 1:
        return og.private.PoissonSampler(rows, rate, **about)
    return og.private.CyclicPoissonSampler(rows, rate, way.parts, **about)


def site(
    data: Any, way: Way, noise: float, clip: float, lr: float, steps: int, seed: int, group, stop
) -> Found:
    """Trains, and returns what is found; equal at all sites."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model, rank = nn.Sequential(*layers), group.rank()
    x, y = data["x"][rank::SITES], data["y"][rank::SITES]
    private = og.Private(clip=clip, noise=noise, batch=BATCH, **way.about)
    session = og.distribute(model, way.method, transform=private, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = sampler(way, len(x), BATCH / len(data["x"]), rank, steps, seed)
    for rows in stop.checked(iter(batches)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    sent_bytes = session.stats().total_sent_bytes / steps
    session.detach()
    with torch.no_grad():
        out = model(data["test_x"])
    loss = nn.functional.cross_entropy(out, data["test_y"]).item()
    accuracy = (out.argmax(dim=1) == data["test_y"]).double().mean().item()
    return Found(loss, accuracy, sent_bytes)


def noise_of(way: Way, epsilon: float, rate: float, steps: int) -> float:
    """Returns the least noise within ε."""
    sampling = og.private.CyclicPoisson(rate, way.parts) if way.parts > 1 else rate
    return og.private.noise_for(epsilon, DELTA, sampling, steps)


def mnist() -> dict[str, torch.Tensor]:
    """Returns images of mean 0 and a length of about 4, and labels."""
    found = load("mnist", Path(os.environ.get("OUTERGRAD_DATA", "data")))
    images = {"x": found.x_train, "test_x": found.x_test}
    mean, length = found.x_train.mean(), found.x_train.flatten(1).norm(dim=1).mean()
    flat = {name: (x.flatten(1) - mean) * 4 / length for name, x in images.items()}
    return {**flat, "y": found.y_train, "test_y": found.y_test}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a row per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="ways whose names have these words")
    asked = parser.parse_args(arguments)
    data = mnist()
    print("way | noise | clip | lr | test loss | accuracy, % | kB per step and site")
    for name, way in WAYS.items():
        if asked.only not in name:
            continue
        noise = noise_of(way, asked.epsilon, BATCH / len(data["x"]), asked.steps)

        def run(settings: tuple[float, float], seed: int, way=way, noise=noise) -> Found:
            return simulate(partial(site, data, way, noise, *settings, asked.steps, seed), SITES)[0]

        best = min(product(CLIPS, RATES), key=lambda settings: run(settings, 0).loss)
        runs = [run(best, 1 + seed) for seed in range(asked.seeds)]
        loss, accuracy, nbytes = (statistics.mean(of) for of in zip(*runs, strict=True))
        told = f"{noise:.2f} | {best[0]} | {best[1]} | {loss:.3f} | {100 * accuracy:.1f}"
        print(f"{name} | {told} | {nbytes / 1e3:.0f}", flush=True)


if __name__ == "__main__":
    main()
