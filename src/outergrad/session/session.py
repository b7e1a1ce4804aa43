"""A session: the life of one distributed model, from `distribute` to `detach`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outergrad.capture.engine import NO_TASK, current_task
from outergrad.core.errors import (
    BoardGoneError,
    DriftError,
    ExchangeError,
    Failure,
    SiteLostError,
    SitesChangedError,
)
from outergrad.core.protocols import Method
from outergrad.core.types import StateDict
from outergrad.record.coverage import Coverage, coverage
from outergrad.record.stats import Stats
from outergrad.record.trials import trials_noted
from outergrad.session.farewell import end_session
from outergrad.session.state import Progress, resumed, saved
from outergrad.session.taking_in import TakingIn
from outergrad.session.transform_checks import noted, units_shown
from outergrad.session.usual_method import usual_noted
from outergrad.step.groups import end_unfinished, lost_sites_told
from outergrad.step.pact import is_in_trouble

_LOG = logging.getLogger("outergrad")


class Session(TakingIn):
    """What `distribute` returns: the model's gradients are shared as long as it is attached."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave this site's gradients in `param.grad`, unshared.

        The first backward outside shares all that has been accumulated, as with DDP: as factors
        while all their rows pay and nobody else wrote to `param.grad` since it was None.

        Raises:
            RuntimeError: a transform has to tell samples apart, which a sum does not.
        """
        if self._batch is not None:
            raise RuntimeError(
                f"session.no_sync(): {self._transform!r} needs the gradient of each sample, which "
                f"is not kept over several passes: share every backward, of one batch"
            )
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def flush(self) -> None:
        """Shares what the last steps of `og.LocalSteps` changed.

        Of gradients all is shared; that all sites have applied the same in the last step is made
        sure of.

        Raises:
            SiteLostError: another site is lost.
            DriftError: sites have applied different things in the last step.
        """
        if self._attached:
            self._require_group()
            self._settle()

    def stepped(self) -> bool:
        """Says to `og.LocalSteps` that this site has made a step that it could not see.

        Nothing to do for methods that share gradients: False.
        """
        return False

    def samples(self, n: int) -> None:
        """Says how many samples the next backward is about, with `weighting="samples"`.

        For a loss that is a mean over something else than the first dimension of what the model
        is called with: tokens, positions that are not masked. Call it on every site before each
        backward; what is said for several backward passes in `no_sync` adds up.

        Raises:
            RuntimeError: the model was distributed with another weighting.
            ValueError: it is no whole number, 0 or more.
        """
        self._weighting.say(n)

    def coverage(self) -> Coverage:
        """How each parameter travels and why; `print(session.coverage())` shows a table."""
        model = self._model
        params = {**model.params, **self._frozen, **self._local}
        units, reasons = units_shown(model, self._compressors)
        compressors = [self._compressors[unit] for unit in units]
        sites, chosen = self._comm.world_size, [self._chosen.get(u) for u in units]
        told = (units, reasons, compressors, sites, chosen)
        seen = (self._header_builder.rows, self._header_builder.untappable)
        lines = self._cadence.noted(coverage(params, self._local, *told, *seen))
        if self._choosing is not None:
            lines = trials_noted(lines, model.units, self._choosing.chooser)
        return usual_noted(noted(lines, self._transform), self._not_auto)

    def choice(self) -> dict[str, Method]:
        """The method that `og.Auto()` has chosen so far for each parameter, by its full name.

        `og.Auto(frozen=session.choice())` goes by it from the first step on, and tries nothing.

        Raises:
            RuntimeError: the methods of this session are not chosen by the time of steps.
        """
        chooser = self._compressors.chooser
        if chooser is None:
            raise RuntimeError("session.choice(): pass og.Auto(...) to og.distribute()")
        of_units = {n: chooser.method_of(unit) for unit in self._model.units for n in unit.params}
        names = [*self._model.params, *self._frozen]
        return {name: of_units.get(name, chooser.method_of(None)) for name in names}

    def stats(self) -> Stats:
        """Bytes and seconds of the last synchronised step, per layer and in total."""
        return self._stats

    def log(self, **values: float) -> None:
        """Tells the recorders what the training loop knows, as `log(loss=loss.item())`.

        Each site tells its own. Not thinned by `every`; does nothing without a recorder.

        Args:
            **values: numbers by name, or tensors of one element.

        Raises:
            TypeError: a value is no number.
        """
        self._reporter.log(self._stats.step, values)

    def state_dict(self) -> StateDict:
        """What the session remembers, to be saved beside the model and the optimizer.

        Every site saves its own, after the same step: what it has not sent yet is known to no
        other. Nor are its `og.Local()` parameters, listed under "local": with these, each site
        saves its own model, too. Plain tensors, numbers, strings, lists and dicts:
        `torch.load(weights_only=True)` reads it. A step whose backward raised is first ended with
        the other sites.

        Raises:
            RuntimeError: this site lost the others in the middle of a step.
            DriftError: sites have applied different things in the last step.
        """
        self._require_group()
        self._settle()
        if current_task() == NO_TASK:
            self._tentative.begin()
        progress = Progress(
            self._stats.step, self._next_forward.tap_next, self._planner.has_autograd_grad
        )
        state = saved(self._owner, progress, self._compressors.states())
        return {**state, "cadence": self._cadence.state(), "samples": self._weighting.state()}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from what the sites saved. Call it on every site: they check it together.

        At the same number of sites training goes on to the bit as if it had not been interrupted.
        At another, what the sites have not sent yet is shared out so that none of it is lost.
        Load the model after `distribute`, which makes its buffers equal to rank 0's.

        Args:
            state: what this site's `state_dict()` returned, or a list of what it returned on all
                sites, in the order of their ranks: that is needed if their number has changed.

        Raises:
            ValueError: on all sites, and nothing is changed: a state is of another version,
                method, model, site or number of sites, or the states are of different steps.
            RuntimeError: the session is detached, or lost the other sites, or is in backward.
        """
        if not self._attached or current_task() != NO_TASK:
            raise RuntimeError("load a state into an attached session, and not during backward")
        self._require_group()
        with lost_sites_told(self._comm, "load_state_dict on all sites", self._stats.step):
            progress, inheritances = resumed(state, self._owner, self._comm)
        self._compressors.load(inheritances)
        self._tentative.forget()
        self._may_owe = True
        self._planner.resume(progress.has_autograd_grad)
        self._cadence.load(state, self._comm.rank, self._comm.world_size)
        own = state if isinstance(state, dict) else state[self._comm.rank % len(state)]
        self._weighting.load(own.get("samples", {}))
        self._next_forward.resume(progress.tap_next)
        self._stats = Stats(step=progress.step, total_sent_bytes=self._comm.sent_bytes)
        self._note_end(counted=False)
        if self._choosing is not None:
            self._choosing.restart()
        self._reporter.resumed()

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the parameters and buffers that each site keeps to itself (`og.Local`)."""
        return self._local_buffers.union(self._local)

    def detach(self) -> None:
        """Ends the session: the model is plain again and keeps its parameters and gradients.

        Call it on every site. A step whose backward raised is first ended with the other sites.
        Where another site is lost before their last steps were compared, this warns of it.

        Raises:
            DriftError: sites have applied different things in the last step.
        """
        if not self._attached:
            return
        self._attached = False
        super().detach()
        self._group.attached.discard(self)
        end_unfinished(self._comm.key)
        told = self._settle_at_end()
        if self._choosing is not None and self._group.lost is None:
            self._choosing.restart()
        self._forget_model()
        end_session(self._comm)
        self._end_watching()
        self._weighting.remove()
        for layer in [*self._next_forward.layers, *self._blocks]:
            layer.restore()
        for watched in [*self._watched.values(), *([self._joint] if self._joint else [])]:
            watched.remove()
        self._accumulator.clear()
        self._reporter.close()
        if isinstance(told, DriftError):
            raise told
        if told is not None:
            warnings.warn(told, stacklevel=2)

    def __del__(self) -> None:
        """Python has found that nobody has the session any more, nor its model.

        No message is sent, as the other sites may do so at another time, or never. They hear by the
        farewell how many steps this site has made, and of what it received in the last ones, and
        compare by that.
        """
        if not getattr(self, "_attached", False) or sys.is_finalizing():  # it has settled then
            return
        self._attached = False
        self._reporter.close()
        if self._several and self._group.lost is None and not self._votes.is_settled:
            _LOG.warning(
                "site %d: a session and its model were given up without session.detach(): this "
                "site has not compared what the sites received in %s",
                self._comm.rank,
                self._votes.about,
            )

    def _end_watching(self) -> None:
        """Who gives up after this finds the word of the end; who did before is answered."""
        group = self._group
        if not group.attached:
            group.end_watching()
        board = self._comm.board
        if board is None or group.lost is not None or group.pact.made == 0:
            return
        with suppress(BoardGoneError, SiteLostError, SitesChangedError):
            if is_in_trouble(board):
                raise self._lost_by(ExchangeError("others gave up", kind=Failure.CLOSED))
