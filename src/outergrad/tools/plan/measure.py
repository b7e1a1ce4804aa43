"""Measurement of methods by steps of one process among mirrors of itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import torch
from torch.optim import SGD

import outergrad as og
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Trace, Tracer
from outergrad.core.protocols import Method
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.record.stats import LayerStats, Stats
from outergrad.session.attach import attach
from outergrad.step.buffers import Kind
from outergrad.tools.named_methods.attach import (
    CONFIGURABLE,
    METHODS,
    Attach,
    Distributed,
    attach_of,
)
from outergrad.tools.plan.interval import FEWEST, Interval
from outergrad.tools.plan.learnt import learnt_by_others
from outergrad.tools.plan.network import Network, as_settled, sent_wire_bytes, step_seconds
from outergrad.tools.plan.subject import Subject

PAIRS = 2
"""Pairs of steps that are measured in a turn. They are pairs, for steps may be of two alternating
kinds."""
LEAST_SHARE = 0.01
"""Share of a step for which its thread had a processor at least, whatever a coarse clock says."""
WARM_UP = 5
"""Steps after which a session omits its headers, whatever it learns in the first ones."""


_UNPLANNED = og.Auto | og.PerLayer | og.LocalSteps


def method_of(name: str) -> Method:
    """Returns the method of a name.

    Raises:
        RecipeError: There is no such method, or it cannot be planned.
    """
    made = attach_of(name, "--methods")
    method = _planned(made)
    if method is None:
        known = [name for name, made in METHODS.items() if _planned(made)]
        settable = [kind for kind in CONFIGURABLE if _planned(attach_of(kind))]
        raise RecipeError(
            f"--methods {name} cannot be planned: use {', '.join(known)}, or "
            f"{' or '.join(settable)} with settings"
        )
    if getattr(method, "every", 1) != 1:
        raise RecipeError(f"--methods {name}: leave out every: steps that exchange are planned")
    return method


def _planned(made: Attach) -> Method | None:
    if not isinstance(made, Distributed) or isinstance(made.method, _UNPLANNED):
        return None
    return made.method


def is_exact(method: Method) -> bool:
    """True if the gradient is the mean of the sites' gradients, up to rounding in float32."""
    return isinstance(method, (og.Dense, og.DAD, og.EDAD)) and not getattr(method, "wire", ())


def forms_gradients(method: Method) -> bool:
    """True if a site computes all that training alone does, and more.

    Low rank does not: where that is less work, it never forms the gradient of a weight.
    """
    return not isinstance(method, og.RankDAD)


Pair = tuple[Trace, Trace]
"""Traces of two steps, one behind the other."""


@dataclass(frozen=True)
class Turn:
    """Measurements of a method while it has its turn.

    Attributes:
        pairs: Traces of the measured steps.
        threads: PyTorch's.
        stats: The session's statistics of the last two steps, averaged.
        learnt: In words, information that the session gives to other sites.
    """

    pairs: Sequence[Pair]
    threads: int = 1
    stats: Stats = field(default_factory=Stats)
    learnt: str = ""

    @property
    def quickest(self) -> Pair:
        """The pair of steps that took least. What disturbs a step only makes it longer."""
        return min(self.pairs, key=_computed_s)

    @property
    def compute_s(self) -> Interval:
        """Seconds that a step computes where no other program has the processor.

        They are not more than it took. With one thread, they are not more than that had a
        processor. Other programs that have it for a part of the time have the caches, too, which
        makes the rest of the step longer, by less than that part.
        """
        took_s = _computed_s(self.quickest)
        had_s = max(mean(trace.processor_s for trace in self.quickest), LEAST_SHARE * took_s)
        waited = 1 - had_s / took_s
        return Interval(had_s * (1 - waited / 2), had_s if self.threads == 1 else took_s)


def _computed_s(pair: Pair) -> float:
    return mean(trace.compute_s for trace in pair)


@dataclass
class Planned:
    """Measurements of a method.

    Attributes:
        method: Its name.
        exact: True if its gradient is exact.
        network: Network between the sites.
        within: Another candidate, all of whose computation this one does, too.
        turns: Measurements of each turn.
    """

    method: str
    exact: bool
    network: Network
    within: Planned | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def stats(self) -> Stats:
        """The session's statistics of a step."""
        return self.turns[-1].stats

    @property
    def learnt(self) -> str:
        """In words, information that it gives to other sites."""
        return self.turns[-1].learnt

    @property
    def sent_bytes(self) -> int:
        """Payload that site 0 sends in a step, as its `session.stats()` counts it."""
        return self.stats.sent_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes an interface sends, averaged over the sites, as `outergrad bench` counts them."""
        messages = [message for trace in self.last for message in trace.messages]
        nbytes = sum(sent_wire_bytes(message, self.network) for message in messages)
        return nbytes / len(self.last)

    @property
    def last(self) -> Pair:
        """Traces of the last two steps."""
        return self.turns[-1].pairs[-1]

    @property
    def messages(self) -> int:
        """Number of collectives in a step."""
        return len(self.last[-1].messages)

    @property
    def compute_s(self) -> Interval:
        """Seconds of computation in a step."""
        own = Interval.of([turn.compute_s for turn in self.turns])
        return own if self.within is None else own.at_least(self.within.compute_s)

    def seconds(self, link: ShapedLink) -> Interval:
        """Seconds of a step on a link.

        The computation was measured, and is in doubt. The waits follow from it and from the bytes.
        """
        pair = min((turn.quickest for turn in self.turns), key=_computed_s)
        known = self.compute_s
        bounds = (self._step_s(pair, link, compute_s) for compute_s in (known.low, known.high))
        return Interval(*bounds)

    def _step_s(self, pair: Pair, link: ShapedLink, compute_s: float) -> float:
        pace = compute_s / _computed_s(pair)
        traces = [trace.as_if(pace * trace.compute_s) for trace in pair]
        return mean(step_seconds(trace, link, self.network) for trace in traces)


def busy_share(planned: Sequence[Planned]) -> float:
    """Returns the share of the measured steps in which the training thread had no processor."""
    traces = [t for one in planned for turn in one.turns for pair in turn.pairs for t in pair]
    computed_s = sum(trace.compute_s for trace in traces)
    return 1 - sum(trace.processor_s for trace in traces) / max(computed_s, 1e-9)


def repeat(
    turns: Sequence[Callable[[], None]],
    seconds: float,
    enough: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Lets candidates take turns until the answer is known; returns the number of rounds.

    Each round begins with another candidate.

    Args:
        turns: A turn of each candidate.
        seconds: Time after which no further round begins.
        enough: True if no further round is needed.
        clock: Clock of these seconds.
    """
    began, order, rounds = clock(), deque(turns), 0
    while True:
        for turn in order:
            turn()
        order.rotate(-1)
        rounds += 1
        if clock() - began >= seconds or (rounds >= FEWEST and enough()):
            return rounds


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Place of the measurements.

    Attributes:
        subject: The model and its batch.
        network: Network between the sites.
        link: Link of each site.
        buffers: How buffers are shared.
    """

    subject: Subject
    network: Network
    link: ShapedLink
    buffers: Kind

    def alone(self) -> Turn:
        """Measures training without exchange.

        Raises:
            RecipeError: A step fails.
        """
        return Turn(_pairs(self.subject, Tracer(), "", warm_up=1), torch.get_num_threads())

    def turn(self, name: str, method: Method) -> Turn:
        """Measures a method among mirrors.

        Raises:
            RecipeError: The method does not fit the model, or its step fails.
        """
        tracer, cost = Tracer(), self.network.cost
        comm, link = MirrorComm(cost.sites, tracer, cost), as_settled(self.link, self.network)
        try:
            session = attach(self.subject.model, method, comm, link, buffers=self.buffers)
        except ValueError as error:
            raise RecipeError(f"--methods {name}: {error}") from error
        stats: deque[Stats] = deque(maxlen=2)
        where = f"--methods {name}: "
        pairs = _pairs(self.subject, tracer, where, WARM_UP, lambda: stats.append(session.stats()))
        learnt = learnt_by_others(session.coverage())
        session.detach()
        return Turn(pairs, torch.get_num_threads(), _mean(*stats), learnt)


def _mean(one: Stats, other: Stats) -> Stats:
    return replace(
        other,
        **_mean_bytes(one, other),
        layers={n: replace(s, **_mean_bytes(one.layers[n], s)) for n, s in other.layers.items()},
    )


def _mean_bytes(one: Stats | LayerStats, other: Stats | LayerStats) -> dict[str, int]:
    names = "sent_bytes", "received_bytes"
    return {name: (getattr(one, name) + getattr(other, name)) // 2 for name in names}


def _pairs(
    subject: Subject,
    tracer: Tracer,
    where: str,
    warm_up: int,
    after_step: Callable[[], None] = lambda: None,
) -> list[Pair]:
    # The cost of a step does not depend on the learning rate; with zero nothing diverges.
    optimizer = SGD(subject.model.parameters(), lr=0.0)
    traces = []
    for _ in range(warm_up + 2 * PAIRS):
        tracer.begin()
        optimizer.zero_grad()
        try:
            subject.loss(subject.model).backward()
        except (RuntimeError, ValueError) as error:
            raise RecipeError(f"{where}{error}") from error
        optimizer.step()
        traces.append(tracer.end())
        after_step()
    measured = traces[warm_up:]
    return [*zip(measured[::2], measured[1::2], strict=True)]
