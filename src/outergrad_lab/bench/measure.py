"""Blocks of steps, in which the methods alternate."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from outergrad.launch.traffic import InterfaceCounter, InterfaceTraffic
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.trainer import Meeting, Phases, Trainer
from outergrad_lab.data import Dataset


@dataclass(frozen=True)
class Block:
    """Consecutive steps by one method, as one site measured them.

    Attributes:
        steps: The phases of each timed step.
        sent: Traffic that the site's interface sent in all of them.
        claimed_bytes: Bytes sent in them, by outergrad's session or a peer.
    """

    steps: list[Phases]
    sent: InterfaceTraffic
    claimed_bytes: int | None

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return sum(phases.step_s for phases in self.steps)


def take_block(trainer: Trainer, steps: int, counter: InterfaceCounter, meeting: Meeting) -> Block:
    """Measures a block of steps; every site must call it."""
    meeting.start()
    sent, claimed = counter.read(), trainer.claimed_bytes()
    phases = [trainer.step() for _ in range(steps)]
    meeting.barrier()  # this site's last bytes may still wait in its queue
    after = trainer.claimed_bytes()
    return Block(
        steps=phases,
        sent=counter.read() - sent,
        claimed_bytes=None if claimed is None or after is None else after - claimed,
    )


@dataclass
class Trainers:
    """One trainer per method.

    Attributes:
        build: Makes the trainer of a method.
        keep: Whether to hold all of them; False: one at a time, where memory is short.
    """

    build: Callable[[str], Trainer]
    keep: bool
    built: dict[str, Trainer] = field(default_factory=dict)

    def get(self, method: str, warmup: int) -> Trainer:
        """Returns the trainer of a method after warm-up: caches filled, PowerSGD under way."""
        fresh = method not in self.built
        if fresh and not self.keep:
            self.clear()
        if fresh:
            self.built[method] = self.build(method)
        for _ in range(warmup if fresh else 1):
            self.built[method].step()
        return self.built[method]

    def clear(self) -> None:
        """Closes all trainers."""
        for trainer in self.built.values():
            trainer.close()
        self.built.clear()
        gc.collect()


def time_steps(
    plan: Plan, data: Dataset | None, keep: bool, counter: InterfaceCounter, meeting: Meeting
) -> Iterator[tuple[str, Block]]:
    """Measures every method, round by round, in another order each time.

    The order changes so that the state in which one method leaves caches and processors does not
    always affect the same other method. A method whose time is used up is left out of further
    rounds.
    """
    trainers = Trainers(lambda method: Trainer(plan, method, data, meeting.site), keep)
    spent = dict.fromkeys(plan.methods, 0.0)
    for turn in range(plan.rounds):
        for method in _in_turn(plan.methods, turn):
            if meeting.told(spent[method] < plan.seconds):
                trainer = trainers.get(method, plan.warmup)
                block = take_block(trainer, plan.steps, counter, meeting)
                spent[method] += block.seconds * (1 + 1 / plan.steps)
                yield method, block
    trainers.clear()


def _in_turn(methods: tuple[str, ...], turn: int) -> list[str]:
    """Returns the given order at first, then a random one; the same at every site."""
    return Random(turn).sample(methods, len(methods)) if turn else list(methods)
