"""Whether two versions of the library compute and send the same: a line per run, to be compared.

    python benchmarks/fingerprints.py > before.txt     # in a checkout of before
    python benchmarks/fingerprints.py > after.txt      # in one of after
    diff before.txt after.txt

Every workload of `outergrad bench` is trained for some steps at two sites (threads of one process)
by every method and in every kind of loop below, on made-up rows; one step has fewer rows on one
site. A line holds the bytes that each site sent and hashes of all gradients, of the weights in the
end and of the sessions' states: equal lines mean equal to the bit. Run it with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

import outergrad as og
from outergrad.launch.simulate import simulate
from outergrad_lab.data import synthetic
from outergrad_lab.workloads import WORKLOADS

SITES = 2
STEPS = 5
LARGE = ("vgg", "wide-mlp")  # what takes minutes
METHODS: dict[str, Callable[[], Any]] = {
    "dense": og.Dense,
    "dad": og.DAD,
    "dad-activations": lambda: og.DAD(reveal="activations"),
    "edad": og.EDAD,
    "rank-dad": lambda: og.RankDAD(rank=4),
    "rank-dad-tolerance": lambda: og.RankDAD(rank=8, tolerance=0.1),
    "alternate": lambda: og.RankDAD(rank=4, reduce="alternate"),
    "two-way": lambda: og.RankDAD(rank=4, reduce="two_way"),
    "bf16": lambda: og.RankDAD(rank=4, wire=og.wire.BF16()),
    "powersgd": lambda: og.PowerSGD(rank=4),
    "every-2": lambda: og.RankDAD(rank=4, every=2),
    "local-steps": lambda: og.LocalSteps(2, method=og.RankDAD(rank=4)),
}


def loops(session: Any, step: int) -> Any:
    """What stands around a step: two passes are accumulated in the third."""
    return session.no_sync() if step == 2 else _nothing()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def fingerprint(workload: str, method: str) -> str:
    """One run, as a line."""
    recipe = WORKLOADS[workload]
    torch.manual_seed(0)
    models = [recipe.build() for _ in range(SITES)]
    rows = [
        synthetic(recipe.format, rows=STEPS * recipe.batch_size, seed=site) for site in range(SITES)
    ]

    def work(group: dist.ProcessGroup, stop: Any) -> tuple[int, str, str, str]:
        site = group.rank()
        model, gradients = models[site], hashlib.sha256()
        session = og.distribute(model, METHODS[method](), group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        for step in range(STEPS):
            begin = step * recipe.batch_size
            end = begin + recipe.batch_size // (2 if (site, step) == (1, 3) else 1)
            x, y = rows[site].x_train[begin:end], rows[site].y_train[begin:end]
            with loops(session, step):
                cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                _add(gradients, parameter.grad)
            if step != 2:
                optimizer.step()
                optimizer.zero_grad()
            stop.check()
        sent = session.stats().total_sent_bytes
        state = _hash_of(session.state_dict())
        session.detach()
        return sent, gradients.hexdigest()[:12], _hash_of(model.state_dict()), state

    found = simulate(work, SITES)
    return f"{workload:10} {method:20} " + "  ".join(
        f"{sent} {gradients} {weights} {state}" for sent, gradients, weights, state in found
    )


def _hash_of(value: Any) -> str:
    known = hashlib.sha256()
    _add(known, value)
    return known.hexdigest()[:12]


def _add(known: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        dense = value.to_dense() if value.is_sparse else value
        known.update(dense.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            known.update(str(key).encode())
            _add(known, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(known, one)
    else:
        known.update(repr(value).encode())


def main() -> None:
    """Prints a line per workload and method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    small = [name for name in WORKLOADS if name not in LARGE]
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=small)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    options = parser.parse_args()
    for workload in options.workloads:
        for method in options.methods:
            try:
                print(fingerprint(workload, method), flush=True)
            except Exception as error:
                print(f"{workload:10} {method:20} {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
