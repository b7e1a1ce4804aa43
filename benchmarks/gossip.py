"""Gossip on a ring of eight sites: rounds until they agree, and accuracy of trainings.

    python benchmarks/gossip.py consensus [PART OF A METHOD'S NAME]
    python benchmarks/gossip.py mnist [STEPS [PART OF WAY AND METHOD, as "split, power"]]

consensus: each site has a Gaussian matrix of 100 × 100. Prints, for each method, the rounds and the
bytes that a site has sent until the distance from the mean is a share of what it was, and how far
the mean has moved meanwhile. CHOCO's gamma is the best of six. A gamma of 1.308 is the best one of
whole weights on this ring.

mnist: an MLP (784-64-10) at eight sites, SGD with Nesterov momentum 0.9, batches of 32 per site.
Data are dealt at random ("even"), or by sorted labels, so that a site has one or two digits
("split"). Prints the accuracy of the mean model and of the single sites, and the bytes that a site
sends per step.
"""

import copy
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import outergrad as og
from outergrad.gossip import Choco, LowRank, PowerGossip, RandomK, metropolis
from outergrad.gossip.ends import Weights, Whole
from outergrad.gossip.graphs import NAMED
from outergrad.launch.simulate import simulate
from outergrad_lab.data import load

SITES = 8
SHARES = (1e-1, 1e-2, 1e-3)
MOST = 2000
GAMMAS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
POWER = {
    "whole": Whole(),
    "whole, faster": Whole(gamma=1.308),
    "power, rank 1": PowerGossip(),
    "power, rank 1, cold": PowerGossip(warm=False),
    "power, rank 1, faster": PowerGossip(gamma=1.308),
    "power, rank 4": PowerGossip(rank=4),
}
CHOCO = {
    "choco, largest 1 %": og.wire.TopK(0.01),
    "choco, random 1 %": RandomK(0.01),
    "choco, signs": og.wire.Sign(),
    "choco, rank 1": LowRank(1),
}


class Ring:
    """Eight sites in one process, which exchange by both ends of each edge."""

    def __init__(self, method):
        self.method, self.sent = method, 0
        self.x = [
            torch.randn(100, 100, generator=_seeded(r), dtype=torch.float64) for r in range(SITES)
        ]
        start = [torch.zeros(100, 100, dtype=torch.float64)]
        self.shares = metropolis(NAMED["ring"].edges(SITES))
        self.ends = {
            (i, j): [method.end(start, i, j, is_first=first) for first in (True, False)]
            for i, j in self.shares
        }

    def round(self):
        """Exchanges once over all edges."""
        weights, moves = [Weights([x]) for x in self.x], []
        for (i, j), (one, other) in self.ends.items():
            said, heard = one.say(weights[i]), other.say(weights[j])
            self.sent += (len(said) + len(heard)) / SITES
            moves.append((i, j, one.hear(said, heard)[0], other.hear(heard, said)[0]))
        for i, j, first, second in moves:
            step = self.shares[i, j] * self.method.gamma
            self.x[i] += step * first
            self.x[j] += step * second

    @property
    def mean(self):
        """Mean over the sites."""
        return torch.stack(self.x).mean(dim=0)

    @property
    def distance(self):
        """Root mean square distance of a site from the mean."""
        mean = self.mean
        return float(torch.stack([(x - mean).square().sum() for x in self.x]).mean().sqrt())


def agree(method, most=MOST):
    """Returns the rounds and the kilobytes until each share, and how far the mean has moved."""
    ring = Ring(method)
    start, mean, found = ring.distance, ring.mean, []
    for round_ in range(1, most + 1):
        ring.round()
        share = ring.distance / start
        while len(found) < len(SHARES) and share <= SHARES[len(found)]:
            found.append((round_, ring.sent / 1000))
        if len(found) == len(SHARES) or not share < 10:
            break
    moved = float((ring.mean - mean).abs().max())
    return found + [None] * (len(SHARES) - len(found)), moved


def tuned(reduce):
    """Returns CHOCO with the gamma that needs fewest rounds to the middle share."""

    def rounds(gamma):
        found, _ = agree(Choco(reduce=reduce, gamma=gamma), most=400)
        return found[1][0] if found[1] else MOST

    return Choco(reduce=reduce, gamma=min(GAMMAS, key=rounds))


def consensus(wanted):
    """Prints a row per method whose name has the text in it."""
    print("method | rounds and kB sent per site until", *SHARES, "| moved the mean by", flush=True)
    for name, found in [*POWER.items(), *CHOCO.items()]:
        if wanted not in name:
            continue
        method = found if name in POWER else tuned(found)
        found, moved = agree(method)
        told = [f"{one[0]}, {one[1]:.0f} kB" if one else "-" for one in found]
        print(f"{name}, gamma {method.gamma:g}", *told, f"{moved:.1e}", sep=" | ", flush=True)


TRAININGS = {
    "all-reduce": og.Dense(),
    "gossip": og.Gossip("ring"),
    "gossip, exponential": og.Gossip("exponential"),
    "gossip, every=4": og.Gossip("ring", every=4),
    "power, rank 1": og.Gossip("ring", PowerGossip()),
    "power, rank 4": og.Gossip("ring", PowerGossip(rank=4)),
    "choco, signs, 0.45": og.Gossip("ring", Choco(reduce=og.wire.Sign(), gamma=0.45)),
    "choco, top 1 %, 0.0375": og.Gossip("ring", Choco(reduce=og.wire.TopK(0.01), gamma=0.0375)),
}


def mnist(steps, wanted):
    """Prints a row per method and way of dealing whose names have the text in them."""
    data = load("mnist", Path(os.environ.get("OUTERGRAD_DATA", "../shared/data")))
    images, labels = data.x_train.flatten(1), data.y_train
    test = data.x_test.flatten(1), data.y_test
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(images.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    dealt = {
        "even": torch.randperm(len(labels), generator=_seeded(0)).chunk(SITES),
        "split": labels.argsort(stable=True).chunk(SITES),
    }
    print("data | method | accuracy of the mean | of the sites, least to most | bytes per step")
    for way, rows in dealt.items():
        for name, method in TRAININGS.items():
            if wanted not in f"{way}, {name}":
                continue
            about = method, start, (images, labels), rows, test, steps
            found = simulate(partial(_train, *about), SITES)
            means, alone, sent = zip(*found, strict=True)
            told = f"{100 * means[0]:.2f}", f"{100 * min(alone):.2f} to {100 * max(alone):.2f}"
            print(way, name, *told, f"{max(sent):.0f}", sep=" | ", flush=True)


def _train(method, start, data, rows, test, steps, group, stop):
    images, labels = data
    rank = group.rank()
    own, model, drawn = rows[rank], copy.deepcopy(start), _seeded(100 + rank)
    session = og.distribute(model, method, group=group)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    before = session.stats().total_sent_bytes
    for _ in stop.checked(range(steps)):
        batch = own[torch.randint(len(own), (32,), generator=drawn)]
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    sent = (session.stats().total_sent_bytes - before) / steps
    alone = _accuracy(model, *test)
    session.flush()
    mean = _accuracy(model, *test)
    session.detach()
    return mean, alone, sent


def _accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).double().mean())


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    kind, *more = sys.argv[1:] or ["consensus"]
    if kind == "mnist":
        mnist(int(more[0]) if more else 300, more[1] if len(more) > 1 else "")
    else:
        consensus(more[0] if more else "")
