"""How many directions Muon's momentum and the weights take where messages are of low rank.

    python benchmarks/momentum_rank.py [METHOD]

Trains the GPT on Shakespeare at two sites for a hundred steps, and prints for each hidden matrix
the rank of the last mean gradient and of the momentum, how many singular values of the momentum
the Newton-Schulz iteration brings to 0.68 and above (those of at least 0.003 of its norm), and the
effective rank of all that the weights have changed by, which is the exponential of the entropy of
their squared singular values.
"""

import os
import sys
from contextlib import closing
from itertools import chain, count, islice
from pathlib import Path

import torch

from outergrad.launch.simulate import simulate
from outergrad_lab.data import load
from outergrad_lab.experiments.hospitals import dealt
from outergrad_lab.experiments.training import TrainingWork
from outergrad_lab.training.training import start

STEPS = 100
WORK = {
    "data": "tinyshakespeare",
    "model": "gpt",
    "widths": [128],
    "sites": 2,
    "batch_size": 8,
    "steps": STEPS,
    "optimizer": "muon",
    "lr": 0.008,
}


def main(method: str) -> None:
    """Prints a row per matrix."""
    work = TrainingWork.of({**WORK, "method": method})
    data = load(work.data, Path(os.environ.get("OUTERGRAD_DATA", "../shared/data")))
    rows, _ = dealt(work, data, None)

    def site(group, stop):
        with closing(start(work, data, rows, group=group, steps=STEPS)) as training:
            model = training.replica.model
            before = {p: p.detach().clone() for p in model.parameters()}
            losses = chain.from_iterable(map(training.epoch, count()))
            for _ in stop.checked(islice(losses, STEPS)):
                pass
            return list(_ranks(training.optimizer, before)) if group.rank() == 0 else []

    print(
        "matrix | shape | rank of the gradient | of the momentum | at least 0.003 of its norm"
        " | effective, of the change"
    )
    for row in simulate(site, work.sites)[0]:
        print(*row, sep=" | ")


def _ranks(optimizer, before):
    for group in (g for g in optimizer.param_groups if g["matrices"]):
        for name, p in zip(group["param_names"], group["params"], strict=True):
            of_gradient = torch.linalg.svdvals(p.grad.double())
            values = torch.linalg.svdvals(optimizer.state[p]["momentum_buffer"].double())
            ranks = [int((s > 1e-6 * s[0]).sum()) for s in (of_gradient, values)]
            changed = torch.linalg.svdvals((p.detach() - before[p]).double())
            share = changed.square() / changed.square().sum()
            effective = float(torch.special.entr(share).sum().exp())
            large = int((values > 0.003 * values.norm()).sum())
            yield name, "x".join(map(str, p.shape)), *ranks, large, f"{effective:.1f}"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "rank-dad:rank=4:error_feedback=None")
