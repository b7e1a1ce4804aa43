"""Tasks of kind "drift": images that change on the way, and exchanges on drift or at intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.optim import Adam

import outergrad as og
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop, simulate
from outergrad_lab.data import Dataset, load
from outergrad_lab.experiments.correction import CHANGES as CORRUPTIONS
from outergrad_lab.experiments.task import Context, at_least

SIDE = 28
ANGLE = 60.0
"""Degrees by which "rotated" turns an image."""
SETTLED = 100
"""Steps after a change in which a further exchange is no false alarm: the model still adapts."""
RECENT = 10
"""Steps over which accuracy is averaged to tell whether a site has recovered."""
NEAR = 0.05
"""Accuracy that a site that has recovered may lack of what it had before the change."""


@dataclass(frozen=True, kw_only=True)
class DriftWork:
    """Trains a small network at several sites on images that change at one site after the other.

    At first all images are as they are. Then, after each `stretch` of steps and up to a third of it
    more, drawn by the seed, the images of the next site turn to the next of `CHANGES`. Each batch
    is predicted before it is trained on.

    Attributes:
        way: One of `WAYS`.
        warmup: Steps before the first change, of which only the bytes count.
        stretch: Fewest steps from one change to the next.
        changes: Number of changes.
        sites: Number of sites.
        batch_size: Rows per site and step.
        width: Of the hidden layer.
        lr: Rate of Adam.
        seed: Seed of weights, batches and times of changes.
    """

    way: str
    warmup: int = at_least(RECENT, 400)
    stretch: int = at_least(RECENT, 300)
    changes: int = at_least(1, 4)
    sites: int = at_least(1, 2)
    batch_size: int = at_least(1, 32)
    width: int = at_least(1, 128)
    lr: float = 0.001
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses a way that is not known."""
        if self.way not in WAYS:
            raise RecipeError(f"way must be one of {', '.join(WAYS)}, not {self.way!r}")

    def run(self, context: Context) -> dict[str, Any]:
        """Trains, in one step of progress per step of training."""
        data = load("mnist", context.data_dir)
        turns = self._turns()
        steps = turns[-1].end
        context.steps(steps)

        def work(group: dist.ProcessGroup, stop: Stop) -> Course:
            with torch.random.fork_rng(devices=()):
                advance = context.advance if group.rank() == 0 else lambda: None
                return self._trained(models[group.rank()], data, turns, group, stop, advance)

        models = [self._model(data) for _ in range(self.sites)]
        courses = simulate(work, self.sites)
        if any(one.exchanges != courses[0].exchanges for one in courses):
            raise RuntimeError("sites have not exchanged at the same steps")
        rows = outcomes(turns, courses, WAYS[self.way].waits)
        return {"rows": rows, "exchanges": courses[0].exchanges}

    def _turns(self) -> list[Turn]:
        """Returns the stretches of the stream: site by site its images turn to the next change."""
        generator = torch.Generator().manual_seed(self.seed)
        names, shown = list(CHANGES)[1:], ["none"] * self.sites
        more = torch.randint(self.stretch // 3 + 1, (self.changes,), generator=generator).tolist()
        found = [Turn(0, self.warmup, None, tuple(shown))]
        for k, extra in enumerate(more):
            site = k % self.sites
            shown[site] = names[(k // self.sites + site) % len(names)]
            begin = found[-1].end
            found.append(Turn(begin, begin + self.stretch + extra, site, tuple(shown)))
        return found

    def _model(self, data: Dataset) -> nn.Module:
        torch.manual_seed(self.seed)
        layers = nn.Linear(SIDE**2, self.width), nn.ReLU(), nn.Linear(self.width, data.classes)
        return nn.Sequential(nn.Flatten(), *layers)

    def _trained(
        self,
        model: nn.Module,
        data: Dataset,
        turns: Sequence[Turn],
        group: dist.ProcessGroup,
        stop: Stop,
        advance: Callable[[], None],
    ) -> Course:
        way = WAYS[self.way]
        session = og.distribute(model, og.LocalSteps(way.k), group=group)
        before = session.transport().sent_bytes
        optimizer = Adam(model.parameters(), lr=self.lr)
        exchanges, accuracy = list[int](), list[float]()
        for step, (x, y) in enumerate(stop.checked(self._batches(data, turns, group.rank()))):
            optimizer.zero_grad()
            logits = model(x)
            accuracy.append((logits.argmax(1) == y).double().mean().item())
            losses = cross_entropy(logits, y, reduction="none")
            if way.waits:
                session.observe(way.values(logits.detach(), losses.detach()))
            losses.mean().backward()
            made = session.stats().step
            optimizer.step()
            if session.stats().step > made:
                exchanges.append(step)
            advance()
        sent = session.transport().sent_bytes - before
        session.detach()
        return Course(exchanges, accuracy, sent)

    def _batches(
        self, data: Dataset, turns: Sequence[Turn], rank: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * self.sites + rank)
        x_own, y_own = data.x_train[rank :: self.sites], data.y_train[rank :: self.sites]
        for turn in turns:
            for _ in range(turn.begin, turn.end):
                rows = torch.randint(len(x_own), (self.batch_size,), generator=generator)
                images = x_own[rows].reshape(-1, 1, SIDE, SIDE)
                yield CHANGES[turn.shown[rank]](images, generator), y_own[rows]


class Turn(NamedTuple):
    """A stretch of the stream.

    Attributes:
        begin: Its first step.
        end: The step behind its last one.
        site: The site whose images have changed at its beginning; None for the first one.
        shown: The change of every site's images.
    """

    begin: int
    end: int
    site: int | None
    shown: tuple[str, ...]


class Course(NamedTuple):
    """A training at one site.

    Attributes:
        exchanges: Steps after which the sites exchanged.
        accuracy: Accuracy of each batch, before it was trained on.
        sent_bytes: Bytes that the site has sent.
    """

    exchanges: list[int]
    accuracy: list[float]
    sent_bytes: int


def outcomes(turns: Sequence[Turn], courses: Sequence[Course], waits: bool) -> list[dict[str, Any]]:
    """Returns what a way has found and cost, a row per change.

    The `delay` of a change that no exchange has followed is all of its stretch. Bytes, exchanges,
    accuracy and false alarms are of the whole stream, and the same in each row.

    Args:
        turns: Of the stream.
        courses: Of every site.
        waits: Whether exchanges wait for drift; else none is an alarm.
    """
    exchanges, first = courses[0].exchanges, turns[0].end
    rows, false, steady = list[dict[str, Any]](), 0, 0
    for before, turn in pairwise(turns):
        inside = [step for step in exchanges if turn.begin <= step < turn.end]
        steady += max(turn.end - turn.begin - SETTLED, 0)
        false += sum(step >= turn.begin + SETTLED for step in inside[1:])
        assert turn.site is not None
        rows.append(
            {
                "case": f"{before.shown[turn.site]} to {turn.shown[turn.site]}",
                "delay": (inside[0] + 1 if inside else turn.end) - turn.begin,
                "missed": float(not inside),
                "recovery": recovery(turn, courses[turn.site].accuracy),
            }
        )
    after = [sum(one.accuracy[first:]) / len(one.accuracy[first:]) for one in courses]
    whole: dict[str, Any] = {
        "exchanges_made": sum(step >= first for step in exchanges),
        "total_bytes": courses[0].sent_bytes,
        "stream_accuracy": sum(after) / len(after),
    }
    if waits:
        whole["false_alarms"] = 1000 * false / steady if steady else 0.0
    return [row | whole for row in rows]


def recovery(turn: Turn, accuracy: Sequence[float]) -> int:
    """Returns the steps after a change until a site's accuracy is near what it was before.

    All of the stretch, if it never is.
    """
    level = sum(accuracy[turn.begin - RECENT : turn.begin]) / RECENT - NEAR
    for step in range(turn.begin + RECENT, turn.end + 1):
        if sum(accuracy[step - RECENT : step]) / RECENT >= level:
            return step - turn.begin
    return turn.end - turn.begin


def _rotated(x: Tensor, _: torch.Generator) -> Tensor:
    """Returns images turned by `ANGLE`, with their darkest value behind the corners."""
    angle, low = torch.tensor(ANGLE).deg2rad(), x.amin()
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    theta = torch.cat([turn, torch.zeros(2, 1)], dim=1).expand(len(x), 2, 3)
    grid = affine_grid(theta, list(x.shape), align_corners=False)
    return grid_sample(x - low, grid, align_corners=False) + low


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": CORRUPTIONS["none"],
    "rotated": _rotated,
    "noise": CORRUPTIONS["noise"],
    "contrast": CORRUPTIONS["contrast"],
}
"""Changes of images; nobody has tuned them to a detector."""


class Way(NamedTuple):
    """When sites exchange.

    Attributes:
        k: Of `og.LocalSteps`.
        values: What a detector listens to, of logits and losses by row.
    """

    k: int | og.OnDrift
    values: Callable[[Tensor, Tensor], Tensor]

    @property
    def waits(self) -> bool:
        """True if exchanges wait for drift."""
        return isinstance(self.k, og.OnDrift)


def _confidences(logits: Tensor, losses: Tensor) -> Tensor:
    return logits.softmax(1).amax(1)


def _losses(logits: Tensor, losses: Tensor) -> Tensor:
    return losses


def _windows(**settings: Any) -> og.OnDrift:
    """Compares windows of ten steps with the twenty steps before, at batches of 32."""
    detector = og.drift.KolmogorovSmirnov(reference=640, window=320, alpha=1e-4, **settings)
    return og.OnDrift(detector, of="observed")


WAYS: dict[str, Way] = {
    **{f"every {k} steps": Way(k, _losses) for k in (10, 20, 100)},
    "confidences, as FLARE": Way(_windows(keeps=True), _confidences),
    "lower confidences": Way(_windows(worse="lower"), _confidences),
    "higher losses": Way(_windows(worse="higher"), _losses),
    "Page-Hinkley": Way(
        og.OnDrift(
            og.drift.PageHinkley(delta=0.05, threshold=2.0, mode="up", min_instances=20),
            of="observed",
        ),
        _losses,
    ),
    "ADWIN": Way(og.OnDrift(og.drift.ADWIN(clock=1), of="observed"), _losses),
}
"""Fixed intervals and detectors, with settings that were chosen on one trial of seed 0."""
