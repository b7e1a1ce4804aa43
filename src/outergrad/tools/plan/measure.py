"""Measurement of methods by steps of one process among mirrors of itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

from torch.optim import SGD

import outergrad as og
from outergrad.comm.mirror import MirrorComm
from outergrad.comm.trace import Trace, Tracer
from outergrad.core.protocols import Method
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.record.stats import LayerStats, Stats
from outergrad.session.attach import attach
from outergrad.tools.named_methods.attach import (
    CONFIGURABLE,
    METHODS,
    Attach,
    Distributed,
    attach_of,
)
from outergrad.tools.plan.network import Network, as_settled, sent_wire_bytes, step_seconds
from outergrad.tools.plan.subject import Subject

ROUNDS = 3
STEPS = 4
"""Measured steps per round. It is even, for steps may be of two alternating kinds."""
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
    if getattr(method, "every", 1) > 1:
        raise RecipeError(f"--methods {name}: leave out every: steps that exchange are planned")
    return method


def _planned(made: Attach) -> Method | None:
    if not isinstance(made, Distributed) or isinstance(made.method, _UNPLANNED):
        return None
    return made.method


def is_exact(method: Method) -> bool:
    """True if the gradient is the mean of the sites' gradients, up to rounding in float32."""
    return isinstance(method, (og.Dense, og.DAD, og.EDAD)) and not getattr(method, "wire", ())


@dataclass
class Planned:
    """Measurements of a method.

    Attributes:
        method: Its name.
        exact: True if its gradient is exact.
        network: Network between the sites.
        traces: Trace of each measured step.
        stats: The session's statistics of the last two steps, averaged.
    """

    method: str
    exact: bool
    network: Network
    traces: list[Trace] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def sent_bytes(self) -> int:
        """Payload that site 0 sends in a step, as its `session.stats()` counts it."""
        return self.stats.sent_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes an interface sends, averaged over the sites, as `outergrad bench` counts them."""
        messages = [message for trace in self.traces[-2:] for message in trace.messages]
        nbytes = sum(sent_wire_bytes(message, self.network) for message in messages)
        return nbytes / len(self.traces[-2:])

    @property
    def messages(self) -> int:
        """Number of collectives in a step."""
        return len(self.traces[-1].messages)

    @property
    def compute_s(self) -> float:
        """Median seconds of computation in a step."""
        return median(trace.compute_s for trace in self.traces)

    def seconds(self, link: ShapedLink) -> float:
        """Median seconds of a step on a link."""
        return median(step_seconds(trace, link, self.network) for trace in self.traces)


def measure(
    subject: Subject,
    methods: dict[str, Method],
    network: Network,
    link: ShapedLink,
    seconds: float,
    progress: Callable[[str], None],
) -> tuple[Planned, list[Planned]]:
    """Runs steps of all methods in turns; each round begins with another method.

    Args:
        subject: The model and its batch.
        methods: Methods by name.
        network: Network between the sites.
        link: Link of each site.
        seconds: Time after which no further round begins.
        progress: Called with the name of each method that has had its turn.

    Returns:
        The measurements of training alone, and of each method.

    Raises:
        RecipeError: A method does not fit the model, or its step fails.
    """
    alone = Planned("alone", True, network)
    planned = {name: Planned(name, is_exact(method), network) for name, method in methods.items()}
    turns: deque[str | None] = deque([None, *methods])
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - began > seconds:
            break
        for name in turns:
            if name is None:
                _run(subject, Tracer(), alone, warm_up=1)
            else:
                _run_shared(subject, methods[name], link, planned[name])
            progress(name or "alone")
        turns.rotate(-1)
    return alone, list(planned.values())


def _run_shared(subject: Subject, method: Method, link: ShapedLink, planned: Planned) -> None:
    tracer = Tracer()
    cost = planned.network.cost
    comm = MirrorComm(cost.sites, tracer, cost)
    try:
        session = attach(subject.model, method, comm, as_settled(link, planned.network))
    except ValueError as error:
        raise RecipeError(f"--methods {planned.method}: {error}") from error
    found: deque[Stats] = deque(maxlen=2)
    _run(subject, tracer, planned, WARM_UP, lambda: found.append(session.stats()))
    planned.stats = _mean(*found)
    session.detach()


def _mean(one: Stats, other: Stats) -> Stats:
    return replace(
        other,
        **_mean_bytes(one, other),
        layers={n: replace(s, **_mean_bytes(one.layers[n], s)) for n, s in other.layers.items()},
    )


def _mean_bytes(one: Stats | LayerStats, other: Stats | LayerStats) -> dict[str, int]:
    names = "sent_bytes", "received_bytes"
    return {name: (getattr(one, name) + getattr(other, name)) // 2 for name in names}


def _run(
    subject: Subject,
    tracer: Tracer,
    planned: Planned,
    warm_up: int,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    # The cost of a step does not depend on the learning rate; with zero nothing diverges.
    optimizer = SGD(subject.model.parameters(), lr=0.0)
    for k in range(warm_up + STEPS):
        tracer.begin()
        optimizer.zero_grad()
        try:
            subject.loss().backward()
        except (RuntimeError, ValueError) as error:
            raise RecipeError(f"--methods {planned.method}: {error}") from error
        optimizer.step()
        trace = tracer.end()
        after_step()
        if k >= warm_up:
            planned.traces.append(trace)
