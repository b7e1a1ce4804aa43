"""Training on real data until the test loss is low enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outergrad.launch.traffic import InterfaceCounter
from outergrad_lab.bench.measure import Block, take_block
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.trainer import Meeting, Trainer
from outergrad_lab.data import Dataset
from outergrad_lab.training.training import test_loss

TEST_ROWS = 1000


@dataclass(frozen=True)
class Mark:
    """Progress of a method.

    Attributes:
        steps: Steps since the start.
        seconds: Seconds spent in them at this site.
        sent_bytes: Bytes sent in them by this site's interface.
        loss: Mean cross-entropy on the first 1000 rows of the test data.
    """

    steps: int = 0
    seconds: float = 0
    sent_bytes: float = 0
    loss: float = float("inf")

    def after(self, block: Block, loss: float) -> Mark:
        """Returns the mark one block later."""
        return Mark(
            steps=self.steps + len(block.steps),
            seconds=self.seconds + block.seconds,
            sent_bytes=self.sent_bytes + block.sent.sent_bytes,
            loss=loss,
        )


def train_until(
    plan: Plan, data: Dataset, counter: InterfaceCounter, meeting: Meeting
) -> Iterator[tuple[str, Mark]]:
    """Trains with every method by turns, a block each, and drops those that are done.

    The first steps count, too. Site 0 computes the test loss, outside of the measured time.
    """
    trainers = {method: Trainer(plan, method, data, meeting.site) for method in plan.methods}
    marks = dict.fromkeys(plan.methods, Mark())
    while trainers:
        for method, trainer in list(trainers.items()):
            block = take_block(trainer, plan.check_every, counter, meeting)
            marks[method] = marks[method].after(block, _test_loss(trainer, data, meeting))
            yield method, marks[method]
            if meeting.told(is_done(plan, marks[method])):
                trainers.pop(method).close()


def _test_loss(trainer: Trainer, data: Dataset, meeting: Meeting) -> float:
    first = meeting.site == 0
    return meeting.told(test_loss(trainer.replica.model, data, TEST_ROWS) if first else None)


def is_done(plan: Plan, mark: Mark) -> bool:
    """True if a method has reached the loss, or is abandoned."""
    assert plan.until_loss is not None
    given_up = mark.steps >= plan.max_steps or mark.seconds >= plan.seconds
    return mark.loss <= plan.until_loss or given_up
