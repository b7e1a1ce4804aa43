"""Reporting of a session's events to its recorders."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outergrad._noise import RecentNoise
from outergrad._version import __version__
from outergrad.buckets.bucket import StepContext
from outergrad.comm.cost import RingCost
from outergrad.core import choosing
from outergrad.core.model import Compressors, Model
from outergrad.core.protocols import Recorder
from outergrad.core.transport import Comm
from outergrad.core.types import Slot
from outergrad.events import Change, End, Event, Layer, Mishap, Run, Scalars, Step, Trial
from outergrad.record.gauge import Gauge, Reading
from outergrad.record.machine import machine
from outergrad.record.recorders import Client, Ending, warn
from outergrad.record.stats import Stats
from outergrad.session.layer_events import LayerEvents, without_samples


class Reporter:
    """Reporter of events to the recorders of a session, to each at its own pace.

    Args:
        recorders: the recorders; one that fails is dropped, with a warning.
        rank: this site.
        sites: number of sites.
        method: the method, as text.
        model: what is shared.
        compressors: of the model's units.
        every: per parameter, the number of passes over which its gradient is a mean.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder],
        rank: int,
        sites: int,
        method: str,
        model: Model,
        compressors: Compressors,
        every: Mapping[str, int],
    ) -> None:
        self._clients = [Client(recorder) for recorder in recorders]
        self._rank, self._sites, self._method = rank, sites, method
        self._model, self._layers = model, LayerEvents(rank, model, compressors, every)
        self._told_s, self._steps = 0.0, 0
        self._noise = RecentNoise()
        self._took_part: tuple[str, ...] = ()
        self._ending = Ending(self)
        matrices: defaultdict[str, list[Slot]] = defaultdict(list)
        for matrix in (matrix for unit in model.units for matrix in unit.matrices):
            matrices[matrix.weight].append(matrix)
        self._gauge = Gauge(dict(matrices), {slot.weight for slot in model.slots if slot.lookup})

    # -- steps ------------------------------------------------------------------------------------

    @property
    def is_silent(self) -> bool:
        """True if there are no recorders (any more)."""
        return not self._clients

    @property
    def by_sample(self) -> bool:
        """True if a recorder asks for single samples."""
        return any(client.samples for client in self._clients)

    def is_due(self, step: int) -> bool:
        """True if a recorder records this step."""
        return bool(self._due(step))

    def reading(self, step: int) -> Reading | None:
        """Begins the measurement of a step; None if no recorder records it."""
        if not self._clients:
            return None
        due = self._due(step)
        allowed_s = max((client.allowed_s for client in due), default=0.0) - self._told_s
        by_sample = any(client.samples for client in due)
        return self._gauge.reading(allowed_s, by_sample=by_sample) if due else None

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
                self._told_s = time.perf_counter() - began

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

    def mishap(self, event: Mishap) -> None:
        """Reports a step that was not applied, or a drift; at once and whatever `every` is."""
        self._tell_everybody(event)

    def trial(self, trial: choosing.Trial) -> None:
        """Reports a trial of other methods, at once and whatever `every` is."""
        told = {**vars(trial), "outcome": trial.outcome.value}
        self._tell_everybody(Trial(rank=self._rank, time=time.time(), **told))

    def take_part(self, comm: Comm) -> None:
        """Notes the names of the sites that take part from now on."""
        self._took_part = tuple(comm.names)

    def sites_changed(self, step: int, comm: Comm) -> None:
        """Reports that other sites take part from a step on."""
        before = self._took_part
        self.take_part(comm)
        lost = tuple(name for name in before if name not in comm.names)
        back = tuple(name for name in comm.names if name not in before)
        about = {"epoch": comm.epoch, "sites": self._took_part, "lost": lost, "back": back}
        self._tell_everybody(Change(rank=self._rank, step=step, time=time.time(), **about))

    def resumed(self) -> None:
        """Forgets the steps reported so far: a saved state was loaded, and others follow."""
        self._noise = RecentNoise()
        for client in self._clients:
            client.forget()

    def close(self, error: str = "") -> None:
        """Reports the end of the session, and closes the recorders.

        Args:
            error: type of the exception that ends the program, if one does.
        """
        self._ending.cancel()
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
        )

    def _tell_everybody(self, event: Scalars | Mishap | Trial | Change) -> None:
        self._begin(event.step)
        for client in list(self._clients):
            self._tell(client, event)

    def _tell_all(self, layers: Sequence[Layer], step: int, stats: Stats) -> None:
        self._noise.take(layers)
        for client in self._due(step):
            told = layers if client.samples else list(map(without_samples, layers))
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


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"session.log({name}={value!r}): give a number") from None
