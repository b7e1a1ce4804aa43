"""Outer steps of `og.LocalSteps`: sent after a local step, applied after it or a later one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from outergrad.capture.optimizer_steps import StepCounter
from outergrad.core.errors import DriftError
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.linalg.gradients import add_rows, as_tensor
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.fragments import Fragment, Fragments
from outergrad.session.inspect import Inspection
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.step import param_grad
from outergrad.step.cadence import Share
from outergrad.step.header_builder import Announced, Loop


class Exchanging(Session):
    """Session whose shared model is the weights as the last exchanges left them.

    These shared weights (`_start`) are parameters of their own. Their gradient is how far this site
    has gone from them. A shared step makes it the mean over the sites, the outer optimizer applies
    it, and every site goes on from there.
    """

    def __init__(
        self,
        inspection: Inspection,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
        method: LocalSteps,
    ) -> None:
        self._trained, self._method = dict(inspection.model.params), method
        self._start = {n: nn.Parameter(p.detach().clone()) for n, p in self._trained.items()}
        self._outer = method.optimizer(list(self._start.values()))
        shared = replace(inspection, model=replace(inspection.model, params=self._start))
        super().__init__(shared, comm, fingerprint, settings)
        self._counter = StepCounter(self._trained, method.period)
        self._fragments = Fragments(inspection.compressors.parts or [frozenset(self._start)])
        self._under_way: Fragment | None = None
        """Fragment that was sent and is not applied yet."""
        self._failed: Exception | None = None
        """Error of the exchange under way: its mean has not arrived, or sites have drifted."""
        self._origin: dict[str, Tensor] = {}
        """Weights from which this site's next change is measured, if not the shared ones: so each
        of its own steps counts once, however exchanges have moved its weights."""
        self._when_sent: dict[str, Tensor] = {}
        """Copy of this site's weights of the fragment under way, taken when it was sent."""

    # -- sending --------------------------------------------------------------------------------

    def _count_samples(self) -> None:
        if not self._weighting.is_even:
            self._fragments.count(self._weighting.take())

    @torch.no_grad()
    def _send(self, *, overlaps: bool) -> None:
        """Begins the exchange of the due fragment, a shared step without a backward.

        Args:
            overlaps: whether this site makes local steps while the messages travel.
        """
        self._require_group()
        self._refuse_converted()
        self._drop_gradients()
        due, share = self._fragments.due, self._next_share()
        for name, p in share.model.params.items():
            param_grad.put(p, self._origin.get(name, p) - self._trained[name])
        weight = 1 if self._weighting.is_even else due.samples
        loop = Loop(weight, self._join, self._buffers.written())
        about = Announced(self._stats.step, share.model.params.keys(), loop=loop)
        own = {"model": share.model, "planner": share.planner, "transform": self._transform}
        with self._giving_up():
            step = self._step = self._new_step(share.header_builder.header(about), **own)
            self._under_way = due
            if overlaps:
                self._when_sent = {name: self._trained[name].clone() for name in due.names}
                step.send()
                self._counter.restart()

    def _next_share(self) -> Share:
        return self._cadence.share(self._fragments.due.names)

    def _refuse_converted(self) -> None:
        for name, p in self._start.items():
            now = self._trained[name]
            if (now.dtype, now.device) != (p.dtype, p.device):
                raise RuntimeError(
                    f"{name!r} was {p.dtype} on {p.device} when the model was distributed and is "
                    f"{now.dtype} on {now.device}: call session.detach(), convert, and distribute "
                    f"again on every site"
                )

    # -- applying -------------------------------------------------------------------------------

    @torch.no_grad()
    def _apply(self, *, ends: bool = False) -> bool:
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
        self._receive()
        failed, fragment = self._failed, self._under_way
        self._failed = self._under_way = None
        if failed is None or isinstance(failed, DriftError):
            self._outer.step()
            self._mix(fragment, ends=ends)
        self._drop_gradients()
        self._when_sent = {}
        if failed is not None:
            raise failed
        return True

    def _receive(self) -> None:
        """Waits for the exchange under way, whose mean is then in `grad` of the shared weights."""
        if self._under_way is None or self._step is None:
            return
        try:
            self._finish(self._step)
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
        owed = self._owed() if resets else {}
        for name in fragment.names:
            own, shared = self._trained[name], self._start[name]
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
            self._counter.restart()

    def _owed(self) -> dict[str, Tensor]:
        """Returns the residuals: what this site has not sent of the fragment's changes, by name."""
        owed: dict[str, Tensor] = {}
        for slot, residual in self._next_share().planner.unsent():
            p = self._start[slot.weight]
            add_rows(owed, slot.weight, slot.weight_rows, as_tensor(residual).to(p.dtype), p)
        return owed

    def _drop_gradients(self) -> None:
        for p in self._start.values():
            p.grad = None

    # -- other uses of the transport ------------------------------------------------------------

    def end_unfinished(self, *, unless: int) -> None:
        """Receives the exchange under way before anything else uses the transport."""
        self._receive()
        super().end_unfinished(unless=unless)

    def _forget_gradients(self) -> None:
        """Does nothing: no backward leaves gradients in the shared weights."""

    # -- saved and loaded -----------------------------------------------------------------------

    def _turns(self) -> StateDict:
        """Returns the fragments' state, and the mean that was received and is not applied yet."""
        waiting = self._under_way is not None
        found = {name: p.grad for name, p in self._start.items() if waiting}
        mean = {name: g.detach().clone() for name, g in found.items() if g is not None}
        own = {"origin": self._origin, "when_sent": self._when_sent}
        copies = {what: {n: x.clone() for n, x in found.items()} for what, found in own.items()}
        return {**self._fragments.state(), "waiting": waiting, "mean": mean, **copies}

    def _load_turns(self, state: StateDict | None) -> None:
        """Goes on from `_turns()`; `state` is None if saved before there were fragments."""
        self._drop_gradients()
        self._failed = self._under_way = None
        self._origin, self._when_sent = {}, {}
        if state is None:
            self._fragments.load({"turn": 0, "fragments": [[self._counter.any_made, 0, True]]})
            return
        self._fragments.load(state)
        if state["waiting"]:
            self._under_way = self._fragments.due
        for name, mean in self._like_start(state["mean"]).items():
            param_grad.put(self._start[name], mean)
        self._origin = self._like_start(state["origin"])
        self._when_sent = self._like_start(state["when_sent"])

    def _like_start(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(self._start[name], copy=True) for name, x in tensors.items()}
