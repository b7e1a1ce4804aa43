"""Times training steps around a hub, at sites that are processes behind shaped links."""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from statistics import mean, median
from threading import Timer
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from outergrad.core.transport import Transport
from outergrad.launch.links import Place, ShapedLink, places
from outergrad.launch.namespaces import INTERFACE
from outergrad.launch.processes import run_processes
from outergrad_lab.bench.trainer import PATIENCE, Meeting
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.job import Job
from outergrad_lab.training.split import Rows
from outergrad_lab.training.training import Training, deal, start

GRACE_S = 120.0
"""Seconds for which the hub waits for an absent site: more than a cut of a line takes."""
_TIMEOUT_S = 400.0
_FEWEST, _MOST = 3, 30
"""Least and most rounds that are timed."""
_WARM = {"auto": 12}
"""Untimed rounds before, by method: the policy of `auto` measures first."""
_USUALLY_WARM, _WARM_OF_MANY_STEPS = 4, 1
_CUT_AFTER_S, _AROUND_A_CUT_S = 0.2, 2.0


@dataclass(frozen=True, kw_only=True)
class AroundHub:
    """Settings of one measurement.

    Attributes:
        job: Training job; its method is not used.
        methods: Methods to time, one after another. A method of PyTorch's own goes from site to
            site, around no hub.
        link: Line of each site.
        hub_rate: Rate of the hub's line, which has the delay of the others.
        seconds: Approximate time for which each method is timed.
        cut_s: Seconds for which a site's line is down once in each method that goes by the hub; 0
            for no cut.
        data_dir: Folder of the data sets.
    """

    job: Job
    methods: tuple[str, ...]
    link: ShapedLink
    hub_rate: str
    seconds: float
    cut_s: float
    data_dir: Path


@dataclass
class Rounds:
    """Measurements of one method at one site; a round is what lies between two exchanges.

    Attributes:
        steps: Steps in a round.
        ends_s: Seconds from the start of the measurement to the end of each round.
        sent_bytes: Bytes sent by its line in all rounds, headers and acknowledgements included.
        received_bytes: Bytes received by its line, likewise.
        undisturbed: Number of rounds around the cut; 0 for no cut.
        disturbed_s: Seconds that these rounds took with the cut.
    """

    steps: int
    ends_s: list[float]
    sent_bytes: int
    received_bytes: int
    undisturbed: int = 0
    disturbed_s: float = 0.0


def time_around_hub(plan: AroundHub) -> dict[str, dict[str, Any]]:
    """Times the methods: step at the slowest site, bytes of a line, cost of a cut; see `combined`.

    Raises:
        RecipeError: The machine lacks what networks need.
        SiteError: A site failed; the others have been ended.
    """
    from outergrad_lab.bench.hub import run_hub, widen

    # Otherwise gloo warns that the addresses of a namespace have no host names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with (
        places(plan.job.sites + 1, plan.link) as (*sites, hub),
        tempfile.TemporaryDirectory(prefix="outergrad-") as name,
    ):
        folder = Path(name)
        widen(hub, plan.link, plan.hub_rate)
        works: list[Any] = [
            partial(time_site, plan, folder, site, place) for site, place in enumerate(sites)
        ]
        found: list[Any] = run_processes(
            [*works, partial(run_hub, folder, hub, len(sites), GRACE_S)]
        )
    return {method: combined([site[method] for site in found[:-1]]) for method in plan.methods}


def time_site(plan: AroundHub, folder: Path, site: int, place: Place) -> dict[str, Rounds]:
    """Runs one site, in a process of its own; returns its measurements by method."""
    from outergrad_lab.bench.hub import say_done, star_at

    place.enter()
    torch.set_num_threads(1)
    sites = plan.job.sites
    where = (folder / "group").as_uri()
    dist.init_process_group(
        "gloo", init_method=where, rank=site, world_size=sites, timeout=PATIENCE
    )
    meeting, way = Meeting(folder / "meeting", site, sites), star_at(folder, site)
    data = load(plan.job.data, plan.data_dir)
    rows = deal(plan.job, data)
    found = {method: _timed(plan, method, data, rows, way, meeting) for method in plan.methods}
    meeting.barrier()  # no site may leave while another still waits for its bytes
    say_done(folder, site)
    return found


def _timed(
    plan: AroundHub, method: str, data: Dataset, rows: Rows, way: Transport, meeting: Meeting
) -> Rounds:
    job = replace(plan.job, method=method)
    options = {"transport": way, "timeout": _TIMEOUT_S}
    with closing(start(job, data, rows, options=options)) as training:
        rounds = _ends(training)
        found = _undisturbed(
            rounds, training.replica.period, _warm(method, training), plan, meeting
        )
        if plan.cut_s and training.replica.session:
            _disturb(found, rounds, plan.cut_s, meeting)
        meeting.barrier()
        return found


def _warm(method: str, training: Training) -> int:
    usual = _USUALLY_WARM if training.replica.period == 1 else _WARM_OF_MANY_STEPS
    return _WARM.get(method, usual)


def _ends(training: Training) -> Iterator[float]:
    """Trains without end; yields when each round was over, by a clock that all processes share."""
    losses = chain.from_iterable(map(training.epoch, count()))
    while True:
        for _ in islice(losses, training.replica.period):
            pass
        yield time.monotonic()


def _undisturbed(
    rounds: Iterator[float], steps: int, warm: int, plan: AroundHub, meeting: Meeting
) -> Rounds:
    """Times rounds for about `plan.seconds`, equally many at all sites."""
    began = [time.monotonic(), *islice(rounds, warm)]
    usual_s = median(np.diff(began)[warm // 2 :])
    wanted = meeting.told(min(max(round(plan.seconds / usual_s), _FEWEST), _MOST))
    meeting.start()
    line, since = _line_bytes(), time.monotonic()
    ends_s = [end - since for end in islice(rounds, int(wanted))]
    meeting.barrier()  # this site's last bytes may still wait in its queue
    sent, received = (after - before for after, before in zip(_line_bytes(), line, strict=True))
    return Rounds(steps, ends_s, sent, received)


def _disturb(found: Rounds, rounds: Iterator[float], cut_s: float, meeting: Meeting) -> None:
    """Trains on while the line of site 0 is down for a while."""
    usual_s = median(np.diff([0.0, *found.ends_s]))
    wanted = int(meeting.told(min(math.ceil(_AROUND_A_CUT_S / usual_s), _MOST)))
    meeting.start()
    since = time.monotonic()
    if meeting.site == 0:
        Timer(_CUT_AFTER_S, _cut, [cut_s]).start()
    found.disturbed_s = [*islice(rounds, wanted)][-1] - since
    found.undisturbed = wanted


def _cut(seconds: float) -> None:
    change = ["ip", "link", "set", INTERFACE]
    subprocess.run([*change, "down"], check=True)
    time.sleep(seconds)
    subprocess.run([*change, "up"], check=True)


def _line_bytes() -> tuple[int, int]:
    found = psutil.net_io_counters(pernic=True, nowrap=False)[INTERFACE]
    return found.bytes_sent, found.bytes_recv


def combined(sites: Sequence[Rounds]) -> dict[str, Any]:
    """Combines the sites' rounds, per step; a round is over when the last site has made it."""
    steps, rounds = sites[0].steps, len(sites[0].ends_s)
    ends_s = np.max([site.ends_s for site in sites], axis=0)
    rounds_s = np.diff(ends_s, prepend=0.0)
    low, middle, high = (np.percentile(rounds_s, (25, 50, 75)) / steps).tolist()
    cut = max(site.disturbed_s for site in sites) - sites[0].undisturbed * middle * steps
    return {
        "step_s": middle,
        "quartiles_s": [low, high],
        "sent_bytes": mean(site.sent_bytes for site in sites) / (steps * rounds),
        "received_bytes": mean(site.received_bytes for site in sites) / (steps * rounds),
        "rounds": rounds,
        "steps": steps,
        "cut_s": cut if sites[0].undisturbed else None,
    }
