"""Reporting of a session's events to its recorders."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outergrad._noise import RecentNoise
from outergrad._version import __version__
from outergrad.buckets.bucket import StepContext
from outergrad.capture.groups import Groups
from outergrad.comm.cost import RingCost
from outergrad.core import choosing
from outergrad.core.model import Compressors, Model
from outergrad.core.protocols import Recorder
from outergrad.core.sites import Site
from outergrad.core.transform import Counter
from outergrad.core.transport import Comm
from outergrad.core.types import Slot
from outergrad.events import (
    Change,
    Disclosure,
    Drift,
    End,
    Evaluation,
    Event,
    Exchange,
    Layer,
    Mishap,
    Privacy,
    Run,
    Scalars,
    Step,
    Trial,
)
from outergrad.record.coverage import Coverage
from outergrad.record.gauge import SPECTRUM, Gauge, Reading
from outergrad.record.groups import GroupSpectra
from outergrad.record.machine import machine
from outergrad.record.recorders import Client, Ending, warn
from outergrad.record.stats import Stats
from outergrad.session.layer_events import LayerEvents, asked
from outergrad.session.settings import Settings

_GROWTH = 1.25
"""By how much the released steps have grown when ε is computed for recorders again."""


class Reporter:
    """Reporter of events to the recorders of a session, to each at its own pace.

    Args:
        recorders: the recorders; one that fails is dropped, with a warning.
        rank: this site.
        sites: number of sites.
        method: the method, as text.
        model: what is shared.
        compressors: of the model's units.
        passes_of: returns the number of passes over which a parameter's gradient is a mean.
        about: further fields of `events.Run`.
        coverage: says what other sites can learn of each parameter.

    Attributes:
        groups: takes labels of samples; None if no recorder asks for groups.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder],
        rank: int,
        sites: int,
        method: str,
        model: Model,
        compressors: Compressors,
        passes_of: Callable[[str], int],
        about: Mapping[str, Any],
        coverage: Callable[[], Coverage],
    ) -> None:
        self._about, self._coverage = about, coverage
        self._learn: dict[str, tuple[str, ...]] = {}
        self._clients = [Client(recorder) for recorder in recorders]
        self.groups = Groups() if any(client.groups for client in self._clients) else None
        self._rank, self._sites, self._method = rank, sites, method
        self._model, self._layers = model, LayerEvents(rank, model, compressors, passes_of)
        self._told_s, self._steps = 0.0, 0
        self._late: tuple[str, ...] = ()
        self._noise = RecentNoise()
        self._name, self._took_part = "", ()
        self._ending = Ending(self)
        self._counter: Counter | None = None
        self._next_told = 0
        matrices: defaultdict[str, list[Slot]] = defaultdict(list)
        for matrix in (matrix for unit in model.units for matrix in unit.matrices):
            matrices[matrix.weight].append(matrix)
        self._gauge = Gauge(dict(matrices), {slot.weight for slot in model.slots if slot.lookup})

    def count_by(self, counter: Counter | None) -> None:
        """Reports also what the steps have released, as this has counted it."""
        self._counter = counter

    # -- steps ------------------------------------------------------------------------------------

    @property
    def is_silent(self) -> bool:
        """True if there are no recorders (any more)."""
        return not self._clients

    @property
    def by_sample(self) -> bool:
        """True if a recorder asks for single samples, or for groups of these."""
        return any(client.samples or client.groups for client in self._clients)

    def is_due(self, step: int) -> bool:
        """True if a recorder records this step."""
        return bool(self._due(step))

    def reading(self, step: int) -> Reading | None:
        """Begins the measurement of a step; None if no recorder records it."""
        due = self._due(step)
        if not due:
            return None
        allowed_s = max(client.allowed_s for client in due) - self._told_s
        by_sample, by_group = any(client.samples for client in due), self._group_spectra(due)
        return self._gauge.reading(allowed_s, by_sample=by_sample, by_group=by_group)

    def _group_spectra(self, due: Sequence[Client]) -> GroupSpectra | None:
        if self.groups is None or not any(client.groups for client in due):
            return None
        site = Site(self._rank, self._name).called
        return GroupSpectra(site, SPECTRUM, labelled=self.groups.are_given)

    def report(self, context: StepContext, stats: Stats) -> None:
        """Reports a step that has been applied; never raises, so that the step stays applied."""
        with self._careful():
            step = context.header.step
            self._take_time(stats)
            began = time.perf_counter()
            self._begin(step)
            if context.reading is not None:
                context.reading.end()
            if self._due(step):
                self._tell_all(list(self._layers.shared(context, stats)), step, stats)
                self._disclose(step)
                self._told_s = time.perf_counter() - began
                if self._counter is not None and self._counter.steps >= self._next_told:
                    self._tell_privacy(stats.step)

    def report_alone(self, stats: Stats) -> None:
        """Reports a step of a single site."""
        with self._careful():
            step = stats.step - 1
            self._take_time(stats)
            self._begin(step)
            reading = self.reading(step)
            if reading is not None:
                layers = list(self._layers.alone(step, reading))
                reading.end()
                self._tell_all(layers, step, stats)
                self._disclose(step)

    def gossip(self, stats: Stats, late: tuple[str, ...], scalars: Mapping[str, float]) -> None:
        """Reports an exchange with neighbours: who was heard, and figures by name."""
        with self._careful():
            step = stats.step - 1
            self._take_time(stats)
            self._begin(step)
            if self._due(step) or late != self._late:
                self.exchange(step, step, stats.took_part, late)
                self.log(step, scalars)
                self._late = late
            if self._due(step):
                self._tell_all([], step, stats)
                self._disclose(step)

    def _disclose(self, step: int) -> None:
        """Reports what other sites can learn, if that has changed since it was last reported."""
        learn = {line.parameter: (line.travels, line.reveals) for line in self._coverage()}
        if learn != self._learn:
            self._learn = learn
            about = {"rank": self._rank, "step": step, "time": time.time()}
            self._tell_everybody(Disclosure(**about, learn=learn))

    def _tell_privacy(self, step: int) -> None:
        """Reports what was released, and waits for a quarter more: ε takes a while to compute."""
        assert self._counter is not None
        figures = self._counter.figures()
        self._next_told = int(figures["steps"] * _GROWTH) + 1
        self._tell_everybody(Privacy(rank=self._rank, step=step, time=time.time(), **figures))

    @contextmanager
    def _careful(self) -> Iterator[None]:
        """Drops all recorders, with a warning, if the block raises."""
        try:
            yield
        except Exception as error:
            self._clients.clear()
            warn(f"this site records nothing any more: {error!r}")

    def _take_time(self, stats: Stats) -> None:
        self._steps = stats.step
        for client in self._clients:
            client.spend(stats)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Reports values of the training loop; raises TypeError for one that is no number."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._tell_everybody(Scalars(rank=self._rank, step=step, time=time.time(), values=numbers))

    def log_eval(self, step: int, fields: Mapping[str, Any]) -> Evaluation:
        """Reports an evaluation, of which all fields but place and time are given; returns it."""
        event = Evaluation(rank=self._rank, step=step, time=time.time(), **fields)
        self._tell_everybody(event)
        return event

    def mishap(self, event: Mishap) -> None:
        """Reports a step that was not applied, or a drift; at once and whatever `every` is."""
        self._tell_everybody(event)

    def trial(self, trial: choosing.Trial) -> None:
        """Reports a trial of other methods, at once and whatever `every` is."""
        told = {**vars(trial), "outcome": trial.outcome.value}
        self._tell_everybody(Trial(rank=self._rank, time=time.time(), **told))

    def exchange(
        self, step: int, number: int, took_part: tuple[str, ...], late: tuple[str, ...]
    ) -> None:
        """Reports who took part in an exchange with a quorum, at once and whatever `every` is."""
        about = {"number": number, "took_part": took_part, "late": late}
        self._tell_everybody(Exchange(rank=self._rank, step=step, time=time.time(), **about))

    def drift(self, step: int, checks: int, sites: tuple[str, ...]) -> None:
        """Reports an exchange to which a check has led, at once and whatever `every` is."""
        about = {"step": step, "checks": checks, "sites": sites}
        self._tell_everybody(Drift(rank=self._rank, time=time.time(), **about))

    def take_part(self, comm: Comm) -> None:
        """Notes the names of the sites that take part from now on."""
        self._took_part = tuple(comm.names)
        self._name = comm.names[comm.rank] if comm.names else ""

    def sites_changed(self, step: int, before: Comm, comm: Comm) -> None:
        """Reports that other sites take part from a step on than `before`."""
        self.take_part(comm)
        lost = {name: rank for rank, name in enumerate(before.names) if name not in comm.names}
        back = tuple(name for name in comm.names if name not in before.names)
        why = {name: why for name, rank in lost.items() if (why := before.why_gone(rank))}
        about = {"epoch": comm.epoch, "sites": self._took_part, "lost": tuple(lost), "back": back}
        about |= {"why": why or None}
        self._tell_everybody(Change(rank=self._rank, step=step, time=time.time(), **about))

    def resumed(self) -> None:
        """Forgets the steps reported so far: a saved state was loaded, and others follow."""
        self._noise, self._learn, self._next_told = RecentNoise(), {}, 0
        for client in self._clients:
            client.forget()

    def close(self, error: str = "") -> None:
        """Reports the end of the session, and closes the recorders.

        Args:
            error: type of the exception that ends the program, if one does.
        """
        self._ending.cancel()
        if self._counter is not None and any(client.begun for client in self._clients):
            with self._careful():
                self._tell_privacy(self._steps)
        end = End(rank=self._rank, step=self._steps, time=time.time(), error=error)
        for client in list(self._clients):
            if client.begun:
                self._tell(client, end)
            self._guarded(client, getattr(client.recorder, "close", lambda: None))
            client.begun = False

    # -- events -----------------------------------------------------------------------------------

    def _due(self, step: int) -> list[Client]:
        return [client for client in self._clients if step % client.every == 0]

    def _begin(self, step: int) -> None:
        """Reports the run to each recorder that has not heard of it."""
        for client in [client for client in self._clients if not client.begun]:
            self._ending.expect()
            client.begun = True
            self._tell(client, self._run(step))

    def _run(self, step: int) -> Run:
        params, ring = self._model.params, RingCost(self._sites)
        return Run(
            rank=self._rank,
            sites=self._sites,
            method=self._method,
            step=step,
            time=time.time(),
            shapes={name: tuple(p.shape) for name, p in params.items()},
            dense_bytes=sum(ring.all_reduce(p.nbytes).sent for p in params.values()),
            outergrad=__version__,
            torch=torch.__version__,
            machine=machine(next((p.device for p in params.values()), torch.device("cpu"))),
            name=self._name,
            took_part=self._took_part,
            python=platform.python_version(),
            **self._about,
        )

    def _tell_everybody(self, event: Event) -> None:
        self._begin(event.step)
        for client in list(self._clients):
            self._tell(client, event)

    def _tell_all(self, layers: Sequence[Layer], step: int, stats: Stats) -> None:
        self._noise.take(layers)
        for client in self._due(step):
            told = [asked(layer, samples=client.samples, groups=client.groups) for layer in layers]
            for event in [*told, self._step(client, step, stats)]:
                self._tell(client, event)

    def _step(self, client: Client, step: int, stats: Stats) -> Step:
        return Step(
            rank=self._rank,
            step=step,
            time=time.time(),
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
            total_sent_bytes=stats.total_sent_bytes,
            took_part=self._took_part,
            noise_batches=self._noise.batches(len(self._took_part) or self._sites),
            **client.pace(step)._asdict(),
        )

    def _tell(self, client: Client, event: Event) -> None:
        self._guarded(client, lambda: client.recorder.record(event))

    def _guarded(self, client: Client, call: Callable[[], object]) -> None:
        if client not in self._clients:
            return
        try:
            call()
        except Exception as error:
            self._clients.remove(client)
            kind = type(client.recorder).__name__
            warn(f"the recorder {kind} failed and is dropped: {error!r}")


def described(settings: Settings, comm: Comm) -> dict[str, Any]:
    """Returns fields of `events.Run` that follow from the settings of a session."""
    transform = "" if settings.transform is None else repr(settings.transform)
    buffers = dict.fromkeys(settings.buffers.names, settings.buffers.kind)
    return {**settings.origin, "transport": comm.way, "transform": transform, "buffers": buffers}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"session.log({name}={value!r}): give a number") from None
