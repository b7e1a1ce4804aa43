"""Outer steps of `og.LocalSteps`: the sites exchange how their weights have changed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outergrad.capture.optimizer_steps import StepCounter
from outergrad.core.errors import DriftError
from outergrad.core.types import StateDict
from outergrad.linalg.gradients import add_rows, as_tensor
from outergrad.methods.local_steps import FollowsModel, LocalSteps
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.failure import FailureHandler
from outergrad.session.fragments import Fragment, Fragments
from outergrad.session.loop import BackwardLoop
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Announced, Loop


class OuterSteps:
    """Exchanges of the change of the weights: begun after one step, applied after it or later.

    The weights as the last exchange left them are parameters of their own, `start`. How far each
    site has gone from them is their gradient: a shared step makes it the mean over the sites, the
    outer optimizer applies it, and every site goes on from there.

    Args:
        trained: the model's parameters, by name, or this rank's shards of them.
        held: those that the user's optimizers hold, by name.
        start: the weights as the last exchange left them, by name.
        method: says how often and how the sites exchange.
        fragments: parts of the weights that take turns.
        core: the session's, which shares `start`.
        failure: aborts the transport if it fails.
        elastic: is asked before the transport is used.
        loop: ends the shared steps.

    Attributes:
        counter: counts this site's own steps.
        start: as the argument.
        optimizer: the outer optimizer.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        held: Mapping[str, nn.Parameter],
        start: Mapping[str, nn.Parameter],
        method: LocalSteps,
        fragments: Fragments,
        core: Core,
        failure: FailureHandler,
        elastic: Elastic,
        loop: BackwardLoop,
    ) -> None:
        self._trained, self.start, self._method, self._fragments = trained, start, method, fragments
        self._exchange, self._at, self._running = core.exchange, core.at, core.running
        self._ranks = core.ranks
        self._failure, self._elastic, self._loop = failure, elastic, loop
        self._drift = core.exchange.drift
        self.optimizer = method.optimizer(list(start.values()))
        self.counter = StepCounter(held, method.period)
        self._under_way: Fragment | None = None
        """Fragment that was sent and is not applied yet."""
        self._failed: Exception | None = None
        """Error of the exchange that is under way."""
        self._origin: dict[str, Tensor] = {}
        """Where this site's next change begins, if not at the shared weights: so each of its own
        steps counts once, whatever it has been moved by exchanges."""
        self._when_sent: dict[str, Tensor] = {}
        """This site's weights of what is under way, as they were when it was sent."""

    def watch(self, model: nn.Module) -> None:
        """Lets an outer optimizer group by the model, and methods forget what it does not average.

        Args:
            model: the model that is trained.
        """
        if not isinstance(self.optimizer, FollowsModel):
            return
        copies = {self._trained[name]: p for name, p in self.start.items()}
        names = {p: name for name, p in self.start.items()}
        forgotten = {names[p] for p in self.optimizer.regroup(model, copies)}
        for compressor, _ in self._exchange.compressors.items():
            compressor.forget(forgotten)

    # -- what is sent -----------------------------------------------------------------------------

    def count_samples(self) -> None:
        """Counts the samples of this site's last steps, if sites weigh by them."""
        if not self._exchange.weighting.is_even:
            self._fragments.count(self._exchange.weighting.take())

    @torch.no_grad()
    def send(self, *, overlaps: bool, weight: int | None = None, whole: bool = False) -> None:
        """Begins the exchange of the due fragment, a shared step without a backward.

        Args:
            overlaps: whether this site makes local steps while the messages travel.
            weight: how much this site counts; None for the usual weight.
            whole: whether all that the sites owe of it travels along.
        """
        self._elastic.require_group()
        self.refuse_converted()
        self._drop_gradients()
        due, share = self._fragments.due, self.next_share()
        for name, p in share.model.params.items():
            param_grad.put(p, self._origin.get(name, p) - self._trained[name])
        if weight is None:
            # All sites may be without samples since the last exchange, and owe nevertheless.
            samples = max(due.samples, 1) if whole else due.samples
            weight = 1 if self._exchange.weighting.is_even else samples
        buffers = self._exchange.buffers.written()
        loop = Loop(weight, self._exchange.attendance.join, buffers, whole)
        about = Announced(self._at.stats.step, share.model.params.keys(), loop=loop)
        own = {
            "model": share.model,
            "planner": share.planner,
            "transform": self._exchange.transform,
        }
        with self._failure.guard():
            step = self._exchange.new_step(share.header_builder.header(about), **own)
            self._loop.enter(step)
            self._under_way = due
            if overlaps:
                self._when_sent = {name: self._trained[name].clone() for name in due.names}
                step.send()
                self.counter.restart()

    def refuse_converted(self) -> None:
        """Raises RuntimeError if a weight has another dtype or device than at first."""
        for name, p in self.start.items():
            now = self._trained[name]
            if (now.dtype, now.device) != (p.dtype, p.device):
                raise RuntimeError(
                    f"{name!r} was {p.dtype} on {p.device} when the model was distributed and is "
                    f"{now.dtype} on {now.device}: call session.detach(), convert, and distribute "
                    f"again on every site"
                )

    def next_share(self) -> Share:
        """Returns what the next exchange is about: the due fragment."""
        return self._exchange.cadence.share(self._fragments.due.names)

    @torch.no_grad()
    def start_here(self) -> None:
        """Makes the weights of now those that the first change begins at."""
        for name, p in self.start.items():
            p.copy_(self._trained[name])

    @torch.no_grad()
    def go_to_start(self) -> None:
        """Makes this site's weights those that its change begins at, so that it has none."""
        for name, p in self.start.items():
            self._trained[name].copy_(p)

    def flush(self, *, whole: bool = False) -> None:
        """Exchanges until all fragments are equal on all sites.

        Args:
            whole: whether all that the sites owe travels along.
        """
        self.apply()
        if self.counter.any_made:
            self.count_samples()
        if whole:
            self._fragments.stepped()  # also where nothing has changed since the last exchange
        while self._fragments.seek():
            self.send(overlaps=False, whole=whole)
            self.apply(ends=True)
        self.counter.restart()
        if self._drift is not None:
            self._drift.restart()

    def stepped(self, holder: str) -> bool:
        """Counts a step of this site's own; returns whether an exchange was applied after it.

        Args:
            holder: name of what made the step.
        """
        self.counter.count(holder)
        self._fragments.stepped()
        applied = False
        if self.counter.reached(self._method.overlap):
            applied = self.apply()
        if self._is_due():
            self.count_samples()
            self.send(overlaps=self._method.overlap > 0)
            if not self._method.overlap:
                applied = self.apply()
        return applied

    def _is_due(self) -> bool:
        """True if the sites are to exchange after this step, as they ask each other on drift."""
        if self._drift is None:
            return self.counter.due
        if not self.counter.reached(self._drift.next_check):
            return False
        self._elastic.require_group()
        with self._failure.guard_between("the other sites' word on whether their data drifted"):
            return self._drift.agrees()
        return False  # the transport has failed, and the next exchange says so

    def end(self) -> Exception | None:
        """Ends the exchanges; returns the error of the last one, which is not applied."""
        failed, self._failed = self._failed, None
        return failed

    # -- what is applied --------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, *, ends: bool = False) -> bool:
        """Waits for the exchange under way, if there is one, and applies it.

        Args:
            ends: whether this site takes the shared weights whole, and keeps none of its own.

        Returns:
            True if it has moved this site's weights.

        Raises:
            DriftError: sites have applied different things before; the exchange counts.
            RuntimeError: the exchange does not count.
        """
        if self._under_way is None:
            return False
        self.receive()
        failed, fragment = self._failed, self._under_way
        self._failed = self._under_way = None
        if failed is None or isinstance(failed, DriftError):
            self.optimizer.step()
            self._mix(fragment, ends=ends)
        self._drop_gradients()
        self._when_sent = {}
        if failed is not None:
            raise failed
        return True

    def take(self, mean: Mapping[str, Tensor]) -> None:
        """Applies a mean change that came in another way than by a shared step."""
        for name, p in self.start.items():
            param_grad.put(p, mean[name])
        self.optimizer.step()
        self._mix(self._fragments.due, ends=True)
        self._drop_gradients()

    def receive(self) -> None:
        """Waits for the exchange under way, whose mean is then in `grad` of the shared weights."""
        if self._under_way is None or self._running.step is None:
            return
        try:
            self._loop.finish(self._running.step)
        except Exception as error:
            self._failed = error
        except BaseException:  # an interrupt: `grad` is still this site's own change, no mean
            self._under_way = None
            raise

    def _mix(self, fragment: Fragment, *, ends: bool) -> None:
        """Moves this site's weights to the shared ones, or some of the way.

        With `error_reset` the target is the shared weights less what this site has not sent of its
        changes. A change is old weights minus new, so subtracting it goes further along it.
        """
        then, self._when_sent = self._when_sent, {}
        kept = 0.0 if ends else self._method.kept
        resets = self._method.error_reset and not ends
        owed: Mapping[str, Tensor] = self._owed() if resets else {}
        for name in fragment.names:
            own, shared = self._trained[name], self.start[name]
            to = shared - owed[name] if name in owed else shared
            meanwhile = then[name] - own if then else None
            own.lerp_(to, 1 - kept) if kept else own.copy_(to)
            if kept or then or resets:
                self._origin[name] = own.clone() if meanwhile is None else own + meanwhile
            else:
                self._origin.pop(name, None)
        fragment.differs = kept > 0 or bool(then) or resets
        fragment.is_spent = True
        self._fragments.pass_on()
        if not then:
            self.counter.restart()
        if self._drift is not None:
            self._drift.restart()

    def _owed(self) -> Mapping[str, Tensor]:
        """Returns the residuals: what this site has not sent of the fragment's changes, by name."""
        share, owed = self.next_share(), dict[str, Tensor]()
        for slot, residual in share.planner.unsent():
            p = self.start[slot.weight]
            add_rows(owed, slot.weight, slot.weight_rows, as_tensor(residual).to(p.dtype), p)
        return self._ranks.unsent(owed, share.model.params)

    def _drop_gradients(self) -> None:
        for p in self.start.values():
            p.grad = None

    def apply_failed(self) -> None:
        """Raises the error of the exchange that is under way, if it has failed."""
        if self._failed is not None:
            self.apply()

    # -- saved and loaded -------------------------------------------------------------------------

    def state(self) -> StateDict:
        """Returns the fragments' state, and the mean that was received and is not applied yet."""
        waiting = self._under_way is not None
        found = {name: p.grad for name, p in self.start.items() if waiting}
        mean = {name: g.detach().clone() for name, g in found.items() if g is not None}
        own = {"origin": self._origin, "when_sent": self._when_sent}
        copies = {what: {n: x.clone() for n, x in found.items()} for what, found in own.items()}
        return {**self._fragments.state(), "waiting": waiting, "mean": mean, **copies}

    def load(self, state: StateDict | None) -> None:
        """Goes on from a saved `state()`, which is None if saved before there were fragments."""
        self._drop_gradients()
        self._failed = self._under_way = None
        self._origin, self._when_sent = {}, {}
        if state is None:
            self._fragments.load({"turn": 0, "fragments": [[self.counter.any_made, 0, True]]})
            return
        self._fragments.load(state)
        if state["waiting"]:
            self._under_way = self._fragments.due
        for name, mean in self._like_start(state["mean"]).items():
            param_grad.put(self.start[name], mean)
        self._origin = self._like_start(state["origin"])
        self._when_sent = self._like_start(state["when_sent"])

    def _like_start(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(self.start[name], copy=True) for name, x in tensors.items()}
