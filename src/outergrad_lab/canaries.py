r"""Lower bounds of ε, measured: can trainings with a canary be told from trainings without it?

An observer sees the sums of all T steps of a model of one layer, an embedding of one feature.
Canary i is a row whose gradient, clipped, is C in number i and 0 elsewhere, so a training has many
of them at once. Coins decide which rows there are in a training. The observer tells them by the
likelihood ratio of what number i was in all steps,

    Π_t (1 − q) + q exp((y_t − ½) / σ²),    y_t: number i of the sum of step t, over C,

the best that there is if the noise is as it is claimed to be. If a training is (ε, δ)-private, any
rule whatever says "was there" of those who were at most e^ε times as often as of those who were
not, but for δ:

    ε ≥ log((P(said so | was there) − δ) / P(said so | was not)).

Both shares are bounded by Clopper and Pearson, the threshold is chosen on other trainings, and the
right side is then a lower bound of ε, whatever the noise is. Canaries of one training count as
trials of their own: they are, if the noise of each number is drawn by itself.

Sources: Jagielski et al., arXiv 2006.07709; Nasr et al., arXiv 2302.07956; many canaries in one
training: Steinke et al., arXiv 2305.08846.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import outergrad as og
from outergrad.launch.simulate import Stop, simulate
from outergrad.private.noise import Noise
from outergrad_lab.training.split import generator_of

CONFIDENCE = 0.95
LENGTH = 10.0
"""Length of a canary's gradient before it is clipped."""
CLIP = 0.5


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Trainings whose rows are canaries, through `og.distribute` and `og.Private`.

    Attributes:
        release: What each step is claimed to release.
        steps: T, steps of a training.
        canaries: Numbers of the layer, each of which some site may have a row for.
        trainings: Number of trainings, an even one.
        seed: Seed of coins, batches and noise.
        shares: What each site multiplies its noise by, to see that less is noticed; as claimed if
            empty.
    """

    release: og.private.Release
    steps: int
    canaries: int = 4096
    trainings: int = 100
    seed: int = 0
    shares: Sequence[float] = ()

    def claimed(self, delta: float) -> float:
        """Returns the ledger's ε of one training."""
        ledger = og.private.Ledger(delta)
        ledger.record(self.release, self.steps)
        return ledger.epsilon()

    def run(self) -> Seen:
        """Trains, and returns what the observer thinks of each canary."""
        return simulate(self._site, self.release.sites)[0]

    def _site(self, group: ProcessGroup, stop: Stop) -> Seen:
        number = group.rank()
        model, private = nn.Embedding(self.canaries, 1), self._private(number)
        session = og.distribute(model, og.Dense(), transform=private, group=group)
        coins = generator_of(self.seed)
        told, there = [], []
        for training in stop.checked(iter(range(self.trainings))):
            there_N = torch.rand(self.canaries, generator=coins) < 0.5
            told.append(self._score(model, there_N, number, training))
            there.append(there_N)
        session.detach()
        return Seen(torch.stack(told), torch.stack(there))

    @property
    def _expected(self) -> float:
        return self.release.sampling.rate * self.canaries / 2

    def _private(self, number: int) -> og.Private:
        private = og.Private(
            clip=CLIP,
            noise=self.release.noise,
            batch=self._expected,
            generator=generator_of(self.seed, number),
        )
        if self.shares:
            less = _Scaled(private._source, self.shares[number])
            object.__setattr__(private, "_source", less)
        return private

    def _score(self, model: nn.Embedding, there_N: Tensor, number: int, training: int) -> Tensor:
        """Makes the steps of a training; returns log-likelihood ratios, (canaries,)."""
        rows_N = torch.arange(self.canaries)
        own = rows_N[there_N & (rows_N % self.release.sites == number)]
        rate, seed = self.release.sampling.rate, self.trainings * self.seed + training
        sampler = og.private.PoissonSampler(
            len(own), rate, site=number, steps=self.steps, seed=seed
        )
        score_N = torch.zeros(self.canaries, dtype=torch.float64)
        for drawn in sampler:
            model.zero_grad()
            (LENGTH * model(own[drawn])).mean().backward()
            assert model.weight.grad is not None
            y_N = model.weight.grad[:, 0].double() * self._expected / CLIP
            of_row_N = torch.exp((y_N - 0.5) / self.release.noise**2)
            score_N += torch.log1p(rate * (of_row_N - 1))
        return score_N


class _Scaled:
    """Noise of another source, times a number."""

    def __init__(self, source: Noise, factor: float) -> None:
        self._source, self._factor = source, factor

    def draw(self, count: int, device: torch.device) -> Tensor:
        """Returns numbers, (count,)."""
        return self._factor * self._source.draw(count, device)


@dataclass(frozen=True)
class Seen:
    """Scores that an observer gives to canaries.

    Attributes:
        scores: The higher, the rather it was there; float64, (trainings, canaries).
        there: Whether it was, (trainings, canaries).
    """

    scores: Tensor
    there: Tensor

    def epsilon(self, delta: float) -> float:
        """Returns a lower bound of ε that holds with a probability of 95%; 0 if there is none.

        The first half of the trainings chooses the threshold, the second half counts.
        """
        half = len(self.scores) // 2
        first, second = (
            _split(self.scores[part], self.there[part]) for part in (slice(half), slice(half, None))
        )
        best = max(_thresholds(first), key=lambda t: _bound(first, t, delta))
        return max(0.0, _bound(second, best, delta))


_Split = tuple[Tensor, Tensor]
"""Scores of those who were there, and of those who were not, both rising."""


def _split(scores: Tensor, there: Tensor) -> _Split:
    return scores[there].sort().values, scores[~there].sort().values


def _thresholds(found: _Split) -> list[float]:
    """Returns scores that ever fewer of those who were not there exceed, down to none."""
    _, absent = found
    above = torch.logspace(0, math.log10(len(absent) / 2), 80, dtype=torch.float64).long() - 1
    return absent[len(absent) - 1 - above.unique()].tolist()


def _bound(found: _Split, threshold: float, delta: float) -> float:
    there, absent = (
        (len(scores) - int(torch.searchsorted(scores, threshold, right=True)), len(scores))
        for scores in found
    )
    least, most = lowest_share(*there) - delta, highest_share(*absent)
    return math.log(least / most) if least > 0 else -math.inf


def lowest_share(hits: int, trials: int) -> float:
    """Returns a lower bound of a probability that holds with half of what `CONFIDENCE` lacks.

    Source: Clopper and Pearson, 1934.
    """
    from scipy.stats import beta

    return float(beta.ppf((1 - CONFIDENCE) / 2, hits, trials - hits + 1)) if hits else 0.0


def highest_share(hits: int, trials: int) -> float:
    """Returns an upper bound of a probability, as `lowest_share`."""
    return 1 - lowest_share(trials - hits, trials)
