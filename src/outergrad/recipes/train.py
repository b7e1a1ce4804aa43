"""One training and its progress: what ``outergrad train`` does at every site."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import torch
from rich.progress import Progress

from outergrad.recipes.console import amount, count, step_bars
from outergrad.recipes.data import Dataset, load
from outergrad.recipes.errors import RecipeError
from outergrad.recipes.job import Job
from outergrad.recipes.recording import recorder_into
from outergrad.recipes.simulate import Stop
from outergrad.recipes.sites import Group, mean_over_sites, prepare_together, rank_in
from outergrad.recipes.split import Rows
from outergrad.recipes.training import Training, deal, start
from outergrad.record.jsonl import JSONL


@dataclass(frozen=True, kw_only=True)
class Report:
    """How far a training has come.

    Attributes:
        epoch: Epochs done.
        step: Steps done.
        loss: Mean over the epoch and the sites.
        test_accuracy: Share of the test labels guessed right, averaged over sites.
        sent_bytes: Gradient bytes per step and site, as the session counts them;
            for DDP, what a ring all-reduce needs; None where nobody counts them.
        seconds: Time spent in steps.
    """

    epoch: int
    step: int
    loss: float
    test_accuracy: float
    sent_bytes: int | None
    seconds: float


class Files(NamedTuple):
    """What a training writes.

    Attributes:
        log: File that gets one line of JSON at the start and one per epoch.
        record: Folder that gets what a report shows.
        every: Record every so many-th step.
        budget: Share of a step that measuring may take.
    """

    log: Path | None = None
    record: Path | None = None
    every: int = 10
    budget: float = 0.04


def train(
    job: Job,
    *,
    data_dir: Path,
    files: Files | None = None,
    verbose: bool = False,
    group: Group = None,
    stop: Stop | None = None,
) -> None:
    """Does this site's part of a job; site 0 shows the progress and the result.

    Args:
        job: The job.
        data_dir: Folder of the data sets.
        files: What to write besides.
        verbose: Whether to show how each parameter travels.
        group: The sites.
        stop: Ends it early, if sites are threads.

    Raises:
        RecipeError: The same at every site, if one of them cannot start.
    """
    first = rank_in(group) == 0
    files = files or Files()
    files = files if first else files._replace(log=None)
    prepare = partial(_prepare, job, data_dir, files, group)
    data, rows_by_site, file, recorder = prepare_together(job, prepare, group)
    with closing(start(job, data, rows_by_site, recorder, group)) as training:
        with file, step_bars(shown=first) as bars:
            report = _run(job, training, file, bars, stop or Stop())
        if first and verbose and training.replica.session:
            print(training.replica.session.coverage())
    if first:
        print(_summary(job, report))


def _prepare(
    job: Job, data_dir: Path, files: Files, group: Group
) -> tuple[Dataset, Rows, IO[str], JSONL | None]:
    data = load(job.data, data_dir)
    recorder = None
    if files.record is not None:
        recorder = recorder_into(files.record, files.every, files.budget, group)
    return data, deal(job, data), _open(files.log or Path(os.devnull)), recorder


def _open(log: Path) -> IO[str]:
    try:
        return log.open("w", buffering=1)
    except OSError as error:
        raise RecipeError(f"--log {log}: {error.strerror}") from error


def _run(job: Job, training: Training, file: IO[str], bars: Progress, stop: Stop) -> Report:
    """Trains, logs the job and every epoch, and returns the last report."""
    reports: list[Report] = []
    print(json.dumps(asdict(job)), file=file)
    for report in _epochs(job, training, bars, stop):
        print(json.dumps(asdict(report)), file=file)
        reports.append(report)
    return reports[-1]


def _epochs(job: Job, training: Training, bars: Progress, stop: Stop) -> Iterator[Report]:
    steps, seconds = training.batches.steps, 0.0
    task = bars.add_task(f"{job.method} on {job.data}", total=job.epochs * steps)
    for epoch in range(job.epochs):
        started = time.perf_counter()
        losses = list(stop.checked(count(bars, task, training.epoch(epoch))))
        if epoch + 1 == job.epochs:
            training.replica.finish()
        seconds += time.perf_counter() - started
        yield Report(
            epoch=epoch + 1,
            step=(epoch + 1) * steps,
            loss=mean_over_sites(torch.tensor(losses).mean(), training.group).item(),
            test_accuracy=training.accuracy(),
            sent_bytes=training.replica.sent_bytes,
            seconds=round(seconds, 3),
        )


def _summary(job: Job, report: Report) -> str:
    sent = "bytes not counted"
    if report.sent_bytes is not None:
        sent = f"{amount(report.sent_bytes)} per step and site"
    return (
        f"{job.method} on {job.data}, {job.sites} sites, {job.split} split: "
        f"test accuracy {report.test_accuracy:.2%}, "
        f"{sent}, {report.seconds:.1f} s"
    )
