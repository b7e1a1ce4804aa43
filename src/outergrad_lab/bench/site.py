"""Runs one site of a benchmark, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from outergrad.launch.console import step_bars
from outergrad.launch.links import Place, ShapedLink
from outergrad.launch.traffic import InterfaceCounter
from outergrad_lab.bench.measure import Block, time_steps
from outergrad_lab.bench.plan import Plan
from outergrad_lab.bench.results import Probe, probe
from outergrad_lab.bench.time_left import TimeLeft
from outergrad_lab.bench.trainer import PATIENCE, Meeting, dataset
from outergrad_lab.bench.until import Mark, train_until


@dataclass
class Found:
    """Measurements of one site on one link.

    Attributes:
        data: Name of the data.
        probe: Rate and latency of the link, where this site measured them.
        blocks: The timed blocks of every method.
        marks: The marks of every method on its course to the wanted loss.
    """

    data: str
    probe: Probe | None
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    marks: dict[str, list[Mark]] = field(default_factory=dict)

    def add(self, method: str, measured: Block | Mark) -> None:
        """Adds one measurement."""
        if isinstance(measured, Block):
            self.blocks.setdefault(method, []).append(measured)
        else:
            self.marks.setdefault(method, []).append(measured)


def run_site(
    plan: Plan,
    link: ShapedLink,
    place: Place,
    folder: Path,
    site: int,
    keep: bool,
    *,
    shown: bool = True,
) -> Found:
    """Joins the other sites and measures.

    Args:
        plan: Settings of the benchmark.
        link: Link that joins the sites.
        place: Place of this site; this process moves there for good.
        folder: Folder where the sites meet; empty before.
        site: Number of this site.
        keep: Whether to hold the models of all methods at once.
        shown: Whether site 0 shows a bar.
    """
    place.enter()
    torch.set_num_threads(plan.threads)
    dist.init_process_group(
        "gloo",
        init_method=(folder / "group").as_uri(),
        rank=site,
        world_size=plan.sites,
        timeout=PATIENCE,
    )
    meeting = Meeting(folder / "meeting", site, plan.sites)
    counter = InterfaceCounter(
        place.interface, sharers=plan.sites if place.namespace is None else 1
    )
    return _measure(plan, link, counter, meeting, keep, shown and site == 0)


def _measure(
    plan: Plan,
    link: ShapedLink,
    counter: InterfaceCounter,
    meeting: Meeting,
    keep: bool,
    shown: bool,
) -> Found:
    data, name = dataset(plan)
    found = Found(name, probe(link.rate_bit_per_s))
    if plan.until_loss and data is not None:
        measured = train_until(plan, data, counter, meeting)
        total = None
    else:
        measured = time_steps(plan, data, keep, counter, meeting)
        total = plan.rounds * len(plan.methods)
    title = f"{plan.workload}, {link.name}"
    for method, one in _shown(measured, title, total, TimeLeft(plan), shown):
        found.add(method, one)
    meeting.barrier()  # no site may leave while another still waits for its bytes
    return found


def _shown(
    measured: Iterator[tuple[str, Block | Mark]],
    title: str,
    total: int | None,
    left: TimeLeft,
    shown: bool,
) -> Iterator[tuple[str, Block | Mark]]:
    """Yields the measurements, and shows a bar with the progress."""
    with step_bars(shown=shown) as bars:
        task = bars.add_task(title, total=total)
        for method, one in measured:
            told = left.told(method, one) if isinstance(one, Mark) else f"{method} done"
            bars.update(task, advance=1, description=f"{title}: {told}")
            yield method, one
