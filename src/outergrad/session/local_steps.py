"""A session of `og.LocalSteps`: sites step by themselves and share how their weights changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import Claim
from outergrad.capture.optimizer_steps import StepCounter, ignore, listen
from outergrad.core.errors import DriftError
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.methods import LocalSteps
from outergrad.record.coverage import Coverage, Travel
from outergrad.session.inspect import Inspection
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step.header_builder import Announced, Loop


class LocalStepsSession(Session):
    """A session whose shared model is the weights as the last exchange left them.

    The weights of then are parameters of their own, and how far each site has gone from them is
    their gradient: a shared step makes it the mean over the sites, the outer optimizer applies it,
    and every site goes on from there. What the user's backward passes do, nobody is told.
    """

    def __init__(
        self,
        inspection: Inspection,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
        method: LocalSteps,
    ) -> None:
        self._trained, self._k = dict(inspection.model.params), method.k
        self._start = {n: nn.Parameter(p.detach().clone()) for n, p in self._trained.items()}
        self._outer = method.optimizer(list(self._start.values()))
        shared = replace(inspection, model=replace(inspection.model, params=self._start))
        super().__init__(shared, comm, fingerprint, settings)
        self._counter = StepCounter({id(p): name for name, p in self._trained.items()}, method.k)
        self._begun = False
        self._claims = [Claim(p, self) for p in self._trained.values()]
        listen(self)

    # -- what users call ------------------------------------------------------------------------

    def flush(self) -> None:
        """Shares what has changed since the last exchange, if anything has: at the end of training.

        Call it on every site, after the same number of steps.

        Raises:
            RuntimeError: this site lost the others.
        """
        if self._attached and self._counter.any_made:
            self._exchange()
        super().flush()

    @contextmanager
    def join(self, *, step: Callable[[], Any] | None = None) -> Iterator[None]:
        """Refused: sites meet after k steps of their optimizers, which one that is out lacks.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "session.join(): LocalSteps goes by the steps of each site's own optimizer, and a site "
            "that has run out makes none: let every site make the same number of steps, as by "
            "starting a shorter loader again"
        )
        yield

    def coverage(self) -> Coverage:
        """How the change of each parameter travels and why."""
        return Coverage(tuple(map(self._explained, super().coverage())))

    def _explained(self, line: Travel) -> Travel:
        if line.parameter not in self._trained:
            return line
        why, reveals = (text.replace("gradient", "change") for text in (line.why, line.reveals))
        often = "every step" if self._k == 1 else f"every {self._k} steps"
        return replace(line, why=f"change of the weights, {often}; {why}", reveals=reveals)

    def state_dict(self) -> StateDict:
        """As `Session.state_dict`, with the weights of the last exchange and the outer optimizer.

        It may be saved between two exchanges, too, beside each site's own model and optimizer.
        """
        local_steps = {
            "start": {name: p.detach().clone() for name, p in self._start.items()},
            "outer": copy.deepcopy(self._outer.state_dict()),
            "made": dict(self._counter.made),
        }
        return {**super().state_dict(), "local_steps": local_steps}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """As `Session.load_state_dict`; the weights of now come with the model.

        What has changed since the last exchange on a site that there is no more is lost: for
        another number of sites save after `flush()`.
        """
        super().load_state_dict(state)
        rank = self._comm.rank
        own = state if isinstance(state, dict) else state[rank % len(state)]
        found = own["local_steps"]
        with torch.no_grad():
            for name, p in self._start.items():
                p.copy_(found["start"][name])
        self._outer.load_state_dict(copy.deepcopy(found["outer"]))
        self._counter.made, self._begun = dict(found["made"]), True

    def detach(self) -> None:
        """Ends the session: each site keeps the weights that it has; `flush()` makes them equal."""
        ignore(self)
        for claim in self._claims:
            claim.remove()
        super().detach()

    # -- what optimizers call -------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """The first step begins: the weights may have been loaded since `distribute`."""
        if self._begun or self._counter.holder(optimizer) is None:
            return
        self._begun = True
        self._refuse_converted()
        with torch.no_grad():
            for name, p in self._start.items():
                p.copy_(self._trained[name])

    def after_step(self, optimizer: Optimizer) -> None:
        """A local step is made; the k-th ends with an exchange."""
        holder = self._counter.holder(optimizer)
        if holder is None:
            return
        self._counter.count(holder)
        if self._counter.due:
            self._exchange()

    # -- an exchange ----------------------------------------------------------------------------

    @torch.no_grad()
    def _exchange(self) -> None:
        self._require_group()
        self._refuse_converted()
        for name, p in self._start.items():
            p.grad = p - self._trained[name]
        drift = None
        try:
            self._share()
        except DriftError as error:  # the exchange counts, and is gone through to its end
            drift = error
        self._outer.step()
        for name, p in self._start.items():
            self._trained[name].copy_(p)
            p.grad = None
        self._counter.restart()
        if drift is not None:
            raise drift

    def _share(self) -> None:
        """Makes the changes their mean over the sites, in a step without a backward."""
        loop = Loop(self._weighting.weight, self._join, self._buffers.written())
        header = self._header_builder.header(
            Announced(self._stats.step, self._start.keys(), loop=loop)
        )
        with self._giving_up():
            step = self._step = self._new_step(header, transform=self._transform)
        self._finish(step)

    def _follow_nodes(self, watch: ModelWatch) -> None:
        """Backward passes are the user's own; what is of another dtype is refused when shared."""

    def _refuse_make_equal(self) -> None:
        raise RuntimeError(
            "session.make_equal(): with LocalSteps every site has weights of its own between two "
            "exchanges: pass og.distribute(..., verify_every=n, on_drift='mend'), which makes "
            "equal what they have in common"
        )

    def _refuse_converted(self) -> None:
        for name, p in self._start.items():
            now = self._trained[name]
            if (now.dtype, now.device) != (p.dtype, p.device):
                raise RuntimeError(
                    f"{name!r} was {p.dtype} on {p.device} when the model was distributed and is "
                    f"{now.dtype} on {now.device}: call session.detach(), convert, and distribute "
                    f"again on every site"
                )
