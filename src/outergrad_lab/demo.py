"""The demo: two sites that hold five of the ten digits each, and five ways to train.

Run by ``make demo``, or by ``python -m outergrad_lab.demo``.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outergrad.launch.console import count, errors_in_one_line, step_bars
from outergrad.launch.loopback import loopback_bytes, stay_on_loopback
from outergrad.launch.start import number_of_sites, run_sites
from outergrad.report import write_page
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.job import Job
from outergrad_lab.training.recording import recorder_into
from outergrad_lab.training.sites import mean_over_sites
from outergrad_lab.training.training import Training, deal, start

SAME_LOSS = 1e-4
FOLDER = Path("runs/demo")
EVERY = 10
LABELS = {
    "pooled": "pooled",
    "alone": "alone",
    "dense": "dense",
    "ddp": "PyTorch DDP",
    "dad": "dAD",
}
JOB = Job(data="digits", split="class", batch_size=16, epochs=15, widths=(512, 512))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one method.

    Attributes:
        accuracy: Share of the test images classified right, averaged over sites.
        losses: Loss of each step, averaged over sites, (steps,).
        sent_bytes: Bytes per step and site.
        measured: Whether they were counted by the loopback interface.
        seconds: Time that the steps took.
    """

    accuracy: float
    losses: Tensor
    sent_bytes: float
    measured: bool
    seconds: float


def demo(job: Job, folder: Path = FOLDER) -> None:
    """Does this site's part; site 0 shows a bar for each method, then the table and a report."""
    data = load(job.data, Path())
    jobs = [replace(job, method=method) for method in LABELS]
    outcomes = {job.method: compare(job, data, folder / job.method) for job in jobs}
    if dist.get_rank() == 0:
        Console().print(table(job, outcomes))
        print(conclusions(outcomes))
        print(_written_report(folder))


def compare(job: Job, data: Dataset, folder: Path) -> Outcome:
    """Trains by one method, measures it and records it; every site must call it."""
    training = start(job, data, deal(job, data), recorder_into(folder, EVERY))
    began_s, before = _moment()
    losses = _train(job, training)
    ended_s, after = _moment()
    sent_bytes, measured = training.replica.sent_bytes or 0, False
    if before is not None and after is not None:
        sent_bytes, measured = (after - before) / job.sites / len(losses), True
    outcome = Outcome(
        accuracy=training.accuracy(),
        losses=mean_over_sites(torch.tensor(losses)),
        sent_bytes=sent_bytes,
        measured=measured,
        seconds=ended_s - began_s,
    )
    training.close()
    return outcome


def _train(job: Job, training: Training) -> list[float]:
    with step_bars(shown=dist.get_rank() == 0) as bars:
        task = bars.add_task(LABELS[job.method], total=job.epochs * training.batches.steps)
        epochs = map(training.epoch, range(job.epochs))
        return list(count(bars, task, chain.from_iterable(epochs)))


def _moment() -> tuple[float, int | None]:
    """Seconds that all sites share, and what the loopback interface has sent, if it counts."""
    dist.barrier()
    return time.perf_counter(), loopback_bytes()


def table(job: Job, outcomes: dict[str, Outcome]) -> Table:
    """Sets the methods side by side."""
    result = Table("method", title=_title(job, outcomes), title_justify="left")
    measured = all(outcome.measured for outcome in outcomes.values())
    sent = "kB per step and site" + ("" if measured else ", computed")
    for heading in ("test accuracy", sent, "ratio to DDP", "seconds"):
        result.add_column(heading, justify="right")
    for method, outcome in outcomes.items():
        result.add_row(*_row(method, outcome, outcomes["ddp"]))
    return result


def _title(job: Job, outcomes: dict[str, Outcome]) -> str:
    widths = "-".join(map(str, (64, *(job.widths or ()), 10)))
    return (
        f"{job.sites} sites, {10 // job.sites} of the ten digits each, "
        f"{job.batch_size} rows per step and site\n"
        f"MLP {widths}, Adam, {len(outcomes['pooled'].losses)} steps"
    )


def _row(method: str, outcome: Outcome, ddp: Outcome) -> tuple[str, ...]:
    ratio = f"{outcome.sent_bytes / ddp.sent_bytes:.3f}" if ddp.sent_bytes else "-"
    return (
        LABELS[method],
        f"{outcome.accuracy:.1%}",
        f"{outcome.sent_bytes / 1000:,.1f}",
        ratio,
        f"{outcome.seconds:.1f}",
    )


def conclusions(outcomes: dict[str, Outcome]) -> str:
    """Says in plain words what the table shows."""
    sentences = [_about_alone(outcomes["alone"]), _about_dad(outcomes)]
    strange_bytes = max(outcomes[silent].sent_bytes for silent in ("pooled", "alone"))
    if strange_bytes > outcomes["ddp"].sent_bytes / 100:
        sentences.append("Other programs used the loopback interface, too: take the kB as bounds.")
    return "\n".join(sentences)


def _about_alone(alone: Outcome) -> str:
    return f"Alone, a site cannot know the digits it never saw: it gets {alone.accuracy:.0%} right."


def _about_dad(outcomes: dict[str, Outcome]) -> str:
    pooled, ddp, dad = (outcomes[name] for name in ("pooled", "ddp", "dad"))
    difference = _largest_difference(dad, pooled)
    return (
        f"dAD {'equals' if difference < SAME_LOSS else 'differs from'} pooled: "
        f"in {len(pooled.losses)} steps, while the loss falls from {pooled.losses[0]:.1f} to "
        f"{pooled.losses[-1]:.0e}, the two are never further apart than {difference:.0e} "
        f"(DDP and pooled: {_largest_difference(ddp, pooled):.0e})."
    )


def _largest_difference(one: Outcome, other: Outcome) -> float:
    return (one.losses - other.losses).abs().max().item()


def _written_report(folder: Path) -> str:
    """Where it lies."""
    try:
        page = write_page([folder / method for method in LABELS], folder / "report.html")
    except ImportError as error:
        return f"No report: {error}"
    return f"Losses, bytes and ranks as a page to look at: {page.path.resolve()}"


def main() -> None:
    """Runs the demo under torchrun, or with two processes of its own."""
    with errors_in_one_line():
        stay_on_loopback()
        sites = number_of_sites(None)
        run_sites(partial(demo, replace(JOB, sites=sites)), sites)


if __name__ == "__main__":
    main()
