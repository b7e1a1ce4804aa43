"""What a session tells recorders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from outergrad._version import __version__
from outergrad.buckets.bucket import StepContext
from outergrad.comm.cost import ring_bytes
from outergrad.core.model import Exchanges, Model
from outergrad.core.protocols import Recorder
from outergrad.events import End, Event, Layer, Mishap, Run, Scalars, Step
from outergrad.linalg.inner import inner
from outergrad.record.gauge import Gauge, Reading
from outergrad.record.quietly import warn
from outergrad.record.recorders import Client, Ending
from outergrad.record.stats import LayerStats, Stats

_LINEAR = ("gradient_norm", "mean_norm", "residual_norm", "delta_norm")
"""What is so many times as large of so many times the gradient."""


class Reporter:
    """Hands events to the recorders of a session, to each at its own pace.

    Args:
        recorders: these; one that fails is dropped, with a warning.
        rank: this site.
        sites: their number.
        method: how gradients travel, as text.
        model: what is shared.
        exchanges: of its units.
        every: of each parameter, over how many passes its gradient is a mean.
    """

    def __init__(
        self,
        recorders: Sequence[Recorder],
        rank: int,
        sites: int,
        method: str,
        model: Model,
        exchanges: Exchanges,
        every: Mapping[str, int],
    ) -> None:
        self._clients = [Client(recorder) for recorder in recorders]
        self._rank, self._sites, self._method = rank, sites, method
        self._model, self._exchanges, self._every = model, exchanges, every
        self._told_s, self._steps = 0.0, 0
        self._ending = Ending(self)
        units = [unit for unit in model.units if unit.matrices]
        matrices = {m.weight: [] for unit in units for m in unit.matrices}
        for unit in units:
            for matrix in unit.matrices:
                matrices[matrix.weight].append(matrix)
        self._gauge = Gauge(matrices, {slot.weight for slot in model.slots if slot.lookup})

    # -- steps ------------------------------------------------------------------------------------

    def reading(self, step: int) -> Reading | None:
        """Measures a step, if a recorder wants to know of it."""
        allowed_s = max((client.allowed_s for client in self._due(step)), default=0.0)
        return self._gauge.reading(allowed_s - self._told_s) if allowed_s else None

    def report(self, context: StepContext, stats: Stats) -> None:
        """Tells of a step, which has been applied: so a failure must not undo it here."""
        if self._clients:
            self._carefully(lambda: self._report(context, stats))

    def report_alone(self, stats: Stats) -> None:
        """Tells of a step of a single site: nothing travels, its gradients are all there are."""
        if self._clients:
            self._carefully(lambda: self._report_alone(stats))

    def _carefully(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            self._clients.clear()
            warn(f"this site records nothing any more: {error!r}")

    def _report(self, context: StepContext, stats: Stats) -> None:
        step = context.header.step
        self._take_time(stats)
        began = time.perf_counter()
        self._begin(step)
        due = self._due(step)
        if context.reading is not None:
            context.reading.end()
        if due:
            self._tell_all(list(self._layers(context, stats)), step, stats)
            self._told_s = time.perf_counter() - began

    def _report_alone(self, stats: Stats) -> None:
        step = stats.step - 1
        self._take_time(stats)
        self._begin(step)
        reading = self.reading(step)
        if reading is None:
            return
        grads = {n: p.grad for n, p in self._model.params.items()}
        layers = []
        for name, grad in ((name, grad) for name, grad in grads.items() if grad is not None):
            reading.mean(name, grad, grad)
            measured = reading.sums[name].measured() | {"relative_error": 0.0}
            layers.append(_alone(self._rank, step, name, measured))
        reading.end()
        self._tell_all(layers, step, stats)

    def _take_time(self, stats: Stats) -> None:
        self._steps = stats.step
        for client in self._clients:
            client.spend(stats)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Tells of what the training loop says.

        Raises:
            TypeError: a value is no number; it is named.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._begin(step)
        own = {"rank": self._rank, "step": step, "time": time.time()}
        for client in list(self._clients):
            self._tell(client, Scalars(**own, values=numbers))

    def mishap(self, event: Mishap) -> None:
        """Tells of a step that came to nothing, at once and whatever `every` is."""
        self._begin(event.step)
        for client in list(self._clients):
            self._tell(client, event)

    def resumed(self) -> None:
        """Other steps follow than those that were told of."""
        for client in self._clients:
            client.forget()

    def close(self, error: str = "") -> None:
        """The session ends.

        Args:
            error: the type of the exception that ends the program, if one does.
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
        """Every recorder first hears of the run."""
        for client in [client for client in self._clients if not client.begun]:
            self._ending.expect()
            client.begun = True
            self._tell(client, self._run(step))

    def _run(self, step: int) -> Run:
        params = self._model.params
        return Run(
            rank=self._rank,
            sites=self._sites,
            method=self._method,
            step=step,
            time=time.time(),
            shapes={name: tuple(p.shape) for name, p in params.items()},
            dense_bytes=sum(ring_bytes(p.nbytes, self._sites) for p in params.values()),
            outergrad=__version__,
            torch=torch.__version__,
        )

    def _layers(self, context: StepContext, stats: Stats) -> Iterator[Layer]:
        """Of all that travelled, and of the weights of blocks: their bytes are the block's."""
        residuals = self._residuals()
        reading = context.reading
        blocks = {block.block.name: block.block.params for block in context.blocks}
        for name, layer in stats.layers.items():
            yield self._layer(context, name, layer, blocks.get(name, (name,)), residuals)
            for weight in blocks.get(name, ()):
                if reading is not None and reading.sums[weight].sigma:
                    yield self._layer(context, weight, LayerStats("replayed"), (), residuals)

    def _layer(
        self,
        context: StepContext,
        name: str,
        layer: LayerStats,
        params: Sequence[str],
        residuals: Mapping[str, float],
    ) -> Layer:
        header, reading = context.header, context.reading
        uses = [header.uses[k] for slot, k in context.slot_index.items() if slot.weight == name]
        by_rows = layer.travels in ("factors", "low rank")
        found: dict[str, Any] = reading.sums[name].measured() if reading is not None else {}
        if layer.travels == "dense":
            found["relative_error"] = 0.0
        if name in residuals:
            found["residual_norm"] = residuals[name]
        found = _mean_over(self._every.get(next(iter(params), name), 1), found)
        return Layer(
            rank=self._rank,
            step=header.step,
            layer=name,
            travels=layer.travels,
            rows=max((use.rows for use in uses), default=0) if by_rows else 0,
            kept_rows=layer.kept_rows,
            sent_bytes=layer.sent_bytes,
            received_bytes=layer.received_bytes,
            compress_s=layer.compress_s,
            replay_s=layer.replay_s,
            wait_s=max((context.waits.get(p, 0.0) for p in params), default=0.0),
            **found,
        )

    def _residuals(self) -> dict[str, float]:
        """By weight, what error feedback keeps."""
        squares: dict[str, float] = {}
        for unit in self._model.units:
            for matrix in unit.matrices:
                residual = self._exchanges[unit].residual(matrix)
                if residual is not None:
                    before = squares.get(matrix.weight, 0.0)
                    squares[matrix.weight] = before + inner(residual, residual)
        return {name: math.sqrt(max(square, 0.0)) for name, square in squares.items()}

    def _tell_all(self, layers: Sequence[Layer], step: int, stats: Stats) -> None:
        """Whom it concerns, of a step."""
        for client in self._due(step):
            for event in [*layers, self._step(client, step, stats)]:
                self._tell(client, event)

    def _step(self, client: Client, step: int, stats: Stats) -> Step:
        return Step(
            rank=self._rank,
            step=step,
            time=time.time(),
            sent_bytes=stats.sent_bytes,
            received_bytes=stats.received_bytes,
            total_sent_bytes=stats.total_sent_bytes,
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


def _mean_over(passes: int, sums: dict[str, Any]) -> dict[str, Any]:
    """What is measured is the sum over the passes of `every=k`; `param.grad` becomes their mean."""
    if passes == 1:
        return sums
    scaled = {name: sums[name] / passes for name in _LINEAR if name in sums}
    if "singular_values" in sums:
        scaled["singular_values"] = tuple(sigma / passes for sigma in sums["singular_values"])
    return sums | scaled


def _alone(rank: int, step: int, name: str, measured: Mapping[str, Any]) -> Layer:
    nothing = dict.fromkeys(("rows", "kept_rows", "sent_bytes", "received_bytes"), 0)
    no_time = dict.fromkeys(("compress_s", "replay_s", "wait_s"), 0.0)
    about = {"rank": rank, "step": step, "layer": name, "travels": "dense"}
    return Layer(**about, **nothing, **no_time, **measured)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"session.log({name}={value!r}): give a number") from None
