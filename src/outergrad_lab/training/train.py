"""One training and its progress, as ``outergrad train`` runs it at every site."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import torch
from rich.progress import Progress

from outergrad._amounts import amount
from outergrad.launch.console import count, step_bars
from outergrad.launch.errors import RecipeError
from outergrad.launch.simulate import Stop
from outergrad.record.jsonl import JSONL
from outergrad.report.summary import cost_of_bytes
from outergrad.tools.named_methods.attach import all_reduce_bytes
from outergrad_lab.data import Dataset, load
from outergrad_lab.training.job import Job
from outergrad_lab.training.recording import recorder_into
from outergrad_lab.training.saving import Position, Saver, Saving
from outergrad_lab.training.sites import Group, mean_over_sites, prepare_together, rank_in
from outergrad_lab.training.split import Rows
from outergrad_lab.training.training import Training, deal, start


@dataclass(frozen=True, kw_only=True)
class Report:
    """Progress of a training.

    Attributes:
        epoch: Epochs done.
        step: Steps done.
        loss: Mean loss over the epoch and the sites.
        test_accuracy: Share of the test labels predicted right, averaged over sites.
        sent_bytes: Gradient bytes per step and site, as the session counts them; for DDP, those of
            a ring all-reduce; None where they are not counted.
        seconds: Seconds spent in steps.
    """

    epoch: int
    step: int
    loss: float
    test_accuracy: float
    sent_bytes: int | None
    seconds: float


class Files(NamedTuple):
    """Files that a training writes.

    Attributes:
        log: File that gets one line of JSON at the start and one per epoch.
        record: Folder that gets the recording for reports.
        every: Interval of recorded steps.
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
    saving: Saving | None = None,
    present: tuple[int, ...] | None = None,
) -> bool:
    """Runs this site's part of a job; site 0 shows the progress and the result.

    Args:
        job: The job.
        data_dir: Folder of the data sets.
        files: Files to write besides.
        verbose: Whether to show how each parameter travels.
        group: The sites.
        stop: Ends it early, if sites are threads.
        saving: Settings of the checkpoints.
        present: Numbers of the sites, where some of the job's are left out.

    Returns:
        Whether the job is done, and not only paused.

    Raises:
        RecipeError: The same at every site, if one of them cannot start.
    """
    first = rank_in(group) == 0
    files = files or Files()
    files = files if first else files._replace(log=None)
    prepare = partial(_prepare, job, data_dir, files, group, saving, present)
    data, rows_by_site, file, recorder = prepare_together(job, prepare, group)
    with file, closing(start(job, data, rows_by_site, recorder, group, present)) as training:
        position = Position(training.batches.steps, training.replica)
        saver = Saver(saving, training, position, job, present)
        again = saver.restore()
        with step_bars(shown=first) as bars:
            _begin_log(file, job, position.epoch if again else 0)
            report = _run(job, training, position, saver, bars, stop or Stop(), file)
        if first and verbose and report and training.replica.session:
            print(training.replica.session.coverage())
    if first and report:
        ddp_bytes = 0 if job.method == "ddp" else all_reduce_bytes(training.replica.model, group)
        print("\n".join([_summary(job, report), *_what_next(report, ddp_bytes, files)]))
    return report is not None


def _prepare(
    job: Job,
    data_dir: Path,
    files: Files,
    group: Group,
    saving: Saving | None,
    present: tuple[int, ...] | None,
) -> tuple[Dataset, Rows, IO[str], JSONL | None]:
    data = load(job.data, data_dir)
    again = saving is not None and saving.begun
    if saving is not None:
        saving.claim(job)
    recorder = None
    if files.record is not None:
        pace = files.every, files.budget
        recorder = recorder_into(files.record, *pace, group, present=present, again=again)
    return data, deal(job, data), _open(files.log), recorder


def _open(log: Path | None) -> IO[str]:
    """Opens the log for reading, too: a resumed training keeps lines of it."""
    if log is None:
        return Path(os.devnull).open("w")
    try:
        return log.open("r+" if log.is_file() else "w", buffering=1)
    except OSError as error:
        raise RecipeError(f"--log {log}: {error.strerror}") from error


def _begin_log(file: IO[str], job: Job, epochs: int) -> None:
    """Writes the job, and keeps the lines of the epochs that are done."""
    kept = file.readlines()[1 : 1 + epochs] if "+" in file.mode else []
    if "+" in file.mode:
        file.seek(0)
        file.truncate()
    file.writelines([json.dumps(asdict(job)) + "\n", *kept])


def _run(
    job: Job,
    training: Training,
    position: Position,
    saver: Saver,
    bars: Progress,
    stop: Stop,
    file: IO[str],
) -> Report | None:
    """Trains, logs every epoch, and returns the last report; None for a pause."""
    report, steps = None, training.batches.steps
    done = position.epoch * steps + position.batch
    label = f"{job.method} on {job.data}"
    task = bars.add_task(label, total=job.epochs * steps, completed=done)
    while position.epoch < job.epochs:
        position.start()
        losses = training.epoch(position.epoch, position.batch)
        for loss in stop.checked(count(bars, task, losses)):
            position.step(loss)
            if saver.step():
                return None
        report = _report(job, training, position)
        print(json.dumps(asdict(report)), file=file)
        position.next_epoch()
    return report


def _report(job: Job, training: Training, position: Position) -> Report:
    if position.epoch + 1 == job.epochs:
        training.replica.finish()
    position.stop()
    return Report(
        epoch=position.epoch + 1,
        step=position.done,
        loss=mean_over_sites(torch.tensor(position.losses).mean(), training.group).item(),
        test_accuracy=training.accuracy(),
        sent_bytes=position.replica.sent_bytes,
        seconds=round(position.seconds, 3),
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


def _what_next(report: Report, ddp_bytes: int, files: Files) -> Iterator[str]:
    """Yields lines about the bytes, the place of the recording, and the next command."""
    if report.sent_bytes and ddp_bytes:
        yield f"That is {cost_of_bytes(report.sent_bytes, ddp_bytes)}."
    if files.record is None:
        yield "Nothing was recorded; to look inside, add --record runs/first."
    else:
        yield f"The record lies in {files.record}. Look at it: outergrad report {files.record}"
