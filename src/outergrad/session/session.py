"""Session: the public methods of a distributed model, from `distribute` to `detach`."""

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
    """Session of a distributed model, from `distribute`: shares gradients while it is attached."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients of backward passes inside it in `param.grad`, unshared.

        The first backward outside shares all that has been accumulated, as with DDP. It travels as
        factors if the method would still send all their rows as factors, and if nothing else wrote
        to `param.grad` since it was None.

        Raises:
            RuntimeError: a transform needs the gradient of each sample, which a sum does not have.
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
        """Shares what the last steps of `og.LocalSteps` have changed.

        With methods that share gradients nothing is left to share, and it only checks that all
        sites have applied the same in the last step.

        Raises:
            SiteLostError: another site is lost.
            DriftError: sites have applied different things in the last step.
        """
        if self._attached:
            self._require_group()
            self._settle()

    def stepped(self) -> bool:
        """Counts, with `og.LocalSteps`, a step of this site that it could not see.

        With methods that share gradients it does nothing, and returns False.
        """
        return False

    def samples(self, n: int) -> None:
        """Sets the number of samples of the next backward, with `weighting="samples"`.

        For a loss that is a mean over something else than the first dimension of the model's
        input: tokens, positions that are not masked. Call it on every site before each backward;
        numbers for several backward passes in `no_sync` add up.

        Args:
            n: number of samples on this site.

        Raises:
            RuntimeError: the model was distributed with another weighting.
            ValueError: `n` is no whole number, 0 or more.
        """
        self._weighting.say(n)

    def coverage(self) -> Coverage:
        """Returns how each parameter travels and why; `print(session.coverage())` shows a table."""
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
        """Returns the method that `og.Auto()` has chosen so far per parameter, by its full name.

        `og.Auto(frozen=session.choice())` uses it from the first step on, without trials.

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
        """Returns bytes and seconds of the last synchronised step, per layer and in total."""
        return self._stats

    def log(self, **values: float) -> None:
        """Sends values of the training loop to the recorders, as `log(loss=loss.item())`.

        Each site logs its own values, not thinned by `every`. Without a recorder it does nothing.

        Args:
            **values: numbers by name, or tensors of one element.

        Raises:
            TypeError: a value is no number.
        """
        self._reporter.log(self._stats.step, values)

    def state_dict(self) -> StateDict:
        """Returns the session's state, to be saved beside the model and the optimizer.

        Every site saves its own, after the same step: no other site knows what it has not sent
        yet, nor its `og.Local()` parameters, listed under "local". With such parameters each site
        saves its own model, too. The state has plain tensors, numbers, strings, lists and dicts:
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
        """Goes on from saved states. Call it on every site: they check the states together.

        With the same number of sites training goes on to the bit as without an interruption. With
        another number, what the sites have not sent yet is divided among them, so that nothing is
        lost. Load the model after `distribute`, which makes its buffers equal to rank 0's.

        Args:
            state: what this site's `state_dict()` returned, or a list of what it returned on all
                sites, in the order of their ranks, needed if the number of sites has changed.

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
        Warns if another site is lost before the sites have compared their last steps.

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
        """Ends a session that was collected together with its model, without `detach`.

        No message is sent, as the other sites may collect theirs at another time, or never. The
        farewell tells them how many steps this site has made and the digests of the last ones, by
        which they compare.
        """
        if not getattr(self, "_attached", False) or sys.is_finalizing():  # it has settled at exit
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
        """Ends the watcher after the last session; joins an abort of the others if there is one."""
        group = self._group
        if not group.attached:
            group.end_watching()
        board = self._comm.board
        if board is None or group.lost is not None or group.pact.made == 0:
            return
        # Sites that abort after this find the farewell instead.
        with suppress(BoardGoneError, SiteLostError, SitesChangedError):
            if is_in_trouble(board):
                raise self._lost_by(ExchangeError("others gave up", kind=Failure.CLOSED))
