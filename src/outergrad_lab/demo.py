"""The demo: two sites with five of the ten digits each, and six ways to train.

Run by ``make demo``, or by ``python -m outergrad_lab.demo``. It uses a link of 100 Mbit/s where
this machine can have one (Linux, root, iproute2), else loopback.
"""

import os
import tempfile
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

from outergrad._amounts import times
from outergrad.launch.console import count, errors_in_one_line, step_bars
from outergrad.launch.links import Place, ShapedLink, parse_link, places, what_is_missing
from outergrad.launch.processes import run_processes
from outergrad.launch.start import TIMEOUT, number_of_sites, run_sites, under_torchrun
from outergrad.launch.traffic import InterfaceCounter, loopback_name, stay_on_loopback
from outergrad.report import write_page
from outergrad.report.summary import USUAL_LINK, on_usual_link
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
    "auto": "the default",
}
JOB = Job(data="digits", split="class", batch_size=16, epochs=9, widths=(1024, 1024))
LINK = "100mbit"
EPOCHS_ON_LINK = 2
"""Few epochs, since every dense step takes four tenths of a second on the link."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one method.

    Attributes:
        accuracy: Share of the test images classified right, averaged over sites.
        losses: Loss of each step, averaged over sites, (steps,).
        sent_bytes: Bytes per step and site.
        measured: Whether the network interface counted these bytes.
        seconds: Seconds that the steps took.
    """

    accuracy: float
    losses: Tensor
    sent_bytes: float
    measured: bool
    seconds: float

    def on_link_s(self, link: str) -> float:
        """Returns seconds of all steps at 100 Mbit/s: measured, or with time for their bytes."""
        if link == LINK:
            return self.seconds
        return self.seconds + len(self.losses) * on_usual_link(self.sent_bytes)


def demo(job: Job, folder: Path = FOLDER, interface: str | None = None) -> None:
    """Runs this site's part; site 0 shows a bar for each method, then the table and a report.

    Args:
        job: Training job.
        folder: Folder for recordings.
        interface: Interface of a link of this site's own; None for loopback.
    """
    data = load(job.data, Path())
    jobs = [replace(job, method=method) for method in LABELS]
    counter = _counter(interface, job.sites)
    outcomes = {job.method: compare(job, data, folder / job.method, counter) for job in jobs}
    if dist.get_rank() == 0:
        link = "loopback" if interface is None else LINK
        Console().print(table(job, outcomes, link))
        print(conclusions(outcomes, link))
        print(_written_report(folder))
        print(verdict(outcomes, link))


def _counter(interface: str | None, sites: int) -> InterfaceCounter | None:
    if interface is not None:
        return InterfaceCounter(interface)
    name = loopback_name()
    return None if name is None else InterfaceCounter(name, sharers=sites)


def compare(job: Job, data: Dataset, folder: Path, counter: InterfaceCounter | None) -> Outcome:
    """Trains by one method, measures it and records it; every site must call it."""
    training = start(job, data, deal(job, data), recorder_into(folder, EVERY))
    began_s, before = _moment(counter)
    losses = _train(job, training)
    ended_s, after = _moment(counter)
    sent_bytes, measured = training.replica.sent_bytes or 0, False
    if before is not None and after is not None:
        sent_bytes, measured = (after - before) / len(losses), True
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


def _moment(counter: InterfaceCounter | None) -> tuple[float, float | None]:
    """Returns the clock behind a barrier, and the bytes a site's interface has sent, if counted."""
    dist.barrier()
    return time.perf_counter(), None if counter is None else counter.read().sent_bytes


def table(job: Job, outcomes: dict[str, Outcome], link: str = "loopback") -> Table:
    """Returns a table of the methods."""
    result = Table("method", title=_title(job, outcomes, link), title_justify="left")
    measured = all(outcome.measured for outcome in outcomes.values())
    sent = "kB per step\nand site" + ("" if measured else ",\ncomputed")
    took = f"seconds at\n{USUAL_LINK}" + ("" if link == LINK else ",\nplanned")
    for heading in ("test accuracy", sent, "/ DDP", took, "/ DDP"):
        result.add_column(heading, justify="right")
    for method, outcome in outcomes.items():
        result.add_row(*_row(method, outcome, outcomes["ddp"], link))
    return result


def _title(job: Job, outcomes: dict[str, Outcome], link: str) -> str:
    widths = "-".join(map(str, (64, *(job.widths or ()), 10)))
    return (
        f"{job.sites} sites, {10 // job.sites} of the ten digits each, "
        f"{job.batch_size} rows per step and site\n"
        f"MLP {widths}, Adam, {len(outcomes['pooled'].losses)} steps, {link}"
    )


def _row(method: str, outcome: Outcome, ddp: Outcome, link: str) -> tuple[str, ...]:
    ratio = f"{outcome.sent_bytes / ddp.sent_bytes:.3f}" if ddp.sent_bytes else "-"
    return (
        LABELS[method],
        f"{outcome.accuracy:.1%}",
        f"{outcome.sent_bytes / 1000:,.1f}",
        ratio,
        f"{outcome.on_link_s(link):.1f}",
        f"{outcome.on_link_s(link) / ddp.on_link_s(link):.2f}",
    )


def conclusions(outcomes: dict[str, Outcome], link: str = "loopback") -> str:
    """Returns sentences about the table."""
    sentences = [_about_alone(outcomes["alone"]), _about_dad(outcomes), _about_auto(outcomes)]
    if link != LINK:
        sentences.append(
            f"Planned seconds are those of the steps here, without a slow link, and those that the "
            f"bytes take at {USUAL_LINK}. As root on Linux, with iproute2, they are measured."
        )
    strange_bytes = max(outcomes[silent].sent_bytes for silent in ("pooled", "alone"))
    if strange_bytes > outcomes["ddp"].sent_bytes / 100:
        sentences.append("Other programs used the interface, too: take the kB as bounds.")
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


def _about_auto(outcomes: dict[str, Outcome]) -> str:
    auto, ddp = outcomes["auto"], outcomes["ddp"]
    return (
        f"og.distribute(model) finds out by itself which way is faster here: its steps, the trials "
        f"among them, take {auto.seconds / ddp.seconds:.2f} times as long as DDP's."
    )


def verdict(outcomes: dict[str, Outcome], link: str = "loopback") -> str:
    """Returns one sentence on exact factors against DDP."""
    dad, ddp = outcomes["dad"], outcomes["ddp"]
    faster = ddp.on_link_s(link) / dad.on_link_s(link)
    speed = f"{times(faster)} times as fast as DDP"
    if dad.sent_bytes and ddp.sent_bytes:
        speed += f", with {times(ddp.sent_bytes / dad.sent_bytes)} times fewer bytes"
    return f"At {USUAL_LINK} exact factors train {speed}, to {dad.accuracy:.0%} right answers."


def _largest_difference(one: Outcome, other: Outcome) -> float:
    return (one.losses - other.losses).abs().max().item()


def _written_report(folder: Path) -> str:
    try:
        page = write_page([folder / method for method in LABELS], folder / "report.html")
    except ImportError as error:
        return f"No report: {error}"
    return f"Losses, bytes and ranks as a page to look at: {page.path.resolve()}"


def main() -> None:
    """Runs the demo under torchrun, or with processes of its own."""
    with errors_in_one_line():
        sites, link = number_of_sites(None), parse_link(LINK)
        job = replace(JOB, sites=sites)
        if under_torchrun() or what_is_missing(link, sites):
            stay_on_loopback()
            run_sites(partial(demo, job), sites)
        else:
            on_link(replace(job, epochs=EPOCHS_ON_LINK), link)


def on_link(job: Job, link: ShapedLink, folder: Path = FOLDER) -> None:
    """Runs the demo with a process for each site, behind a link of its own."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # addresses there have no host names
    with places(job.sites, link) as sites, tempfile.TemporaryDirectory() as meeting:
        store = (Path(meeting) / "store").as_uri()
        works = [partial(_site, job, place, store, k, folder) for k, place in enumerate(sites)]
        run_processes(works)


def _site(job: Job, place: Place, store: str, site: int, folder: Path) -> None:
    place.enter()
    torch.set_num_threads(1)
    about = {"init_method": store, "rank": site, "world_size": job.sites, "timeout": TIMEOUT}
    dist.init_process_group("gloo", **about)
    demo(job, folder, place.interface)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
