"""Gossip on a ring of eight sites: rounds until they agree.

    python benchmarks/gossip.py [PART OF A METHOD'S NAME]

Each site has a Gaussian matrix of 100 × 100. Prints, for each method, the rounds and the bytes that
a site has sent until the distance from the mean is a share of what it was, and how far the mean has
moved meanwhile. CHOCO's gamma is the best of six. A gamma of 1.308 is the best one of whole weights
on this ring. What trainings learn by gossip: `outergrad reproduce gossip`.
"""

import sys

import torch

import outergrad as og
from outergrad.gossip import Choco, LowRank, PowerGossip, RandomK, metropolis
from outergrad.gossip.ends import Weights, Whole
from outergrad.gossip.graphs import NAMED

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


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    consensus(sys.argv[1] if len(sys.argv) > 1 else "")
