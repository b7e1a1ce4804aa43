"""Counting of a session's steps in a ledger, each before its first message."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.packages import missing
from outergrad.core.sites import called
from outergrad.core.transport import Comm
from outergrad.messages.raw import as_tensor, digest
from outergrad.private.correlated import Banded
from outergrad.private.ledger import Ledger, Release, Run, goes_on, runs_of, told_sum
from outergrad.private.sampling import CyclicPoisson, Sampling
from outergrad.private.spent import PrivacySpent, spent

_LOG = logging.getLogger("outergrad")
_MOST_BYTES = 1 << 24
_FAILED = -1
"""Room that a site tells which cannot look for it."""
_NEAR = 0.01
"""Part by which `batch` may differ from what the samplers draw."""


class _Word(NamedTuple):
    """Report of a site to the others, before they count on.

    Attributes:
        state: fingerprint of what its ledger has counted.
        nbytes: length of that state.
        room: how many steps are known to be within the budget.
        is_new: whether it has not compared the expected batches.
        begins: whether parts, and noise in bands, begin anew in its next step.
    """

    state: int
    nbytes: int
    room: int
    is_new: int
    begins: int


@dataclass
class StepCounter:
    """Counts the steps of one session, and stops it before one that the budget has no room for.

    Sites compare what they have counted before the first step with these sites, after a resume, and
    when the room is used up that they have agreed on: as it doubles, seldom. In between each counts
    alone, as they all count the same. Sites that differ by what a killed or lost one has not seen
    go on from the longest count.

    Where batches are of parts in turn, steps without a break in between are a sequence, which is
    counted by the turns of a part. If one begins at a site, as in a new process, after a resume or
    with other sites than before, it begins at all of them, under one name: the noise of no site
    takes back what another has forgotten. A step that was discarded is no break.

    Attributes:
        ledger: counts.
        noise: σ, as in `Release`.
        sampling: how batches are drawn.
        batch: expected samples of all sites together.
        expected: expected samples of this site; None if not known.
        banded: noise of the session, whose sequences are counted with batches of parts in turn.
    """

    ledger: Ledger
    noise: float
    sampling: Sampling
    batch: float
    expected: float | None
    banded: Banded = field(default_factory=lambda: Banded(1))
    _is_agreed: bool = field(default=False, init=False)
    _is_new: bool = field(default=True, init=False)
    _is_spent: bool = field(default=False, init=False)
    _counted: Release | None = field(default=None, init=False)
    _sequence: str = field(default="", init=False)

    def begin(self, comm: Comm) -> None:
        """Checks and counts a step.

        Raises:
            BudgetSpentError: at all sites: the budget has no room for it.
            ImportError: dp-accounting is not installed, and there is a budget.
            ValueError: the ledgers of sites have counted other releases; or `batch` is not what
                the sites draw; or ε is not to be had for such steps.
            RuntimeError: this was raised on another site, which is named.
            OSError: the ledger's file cannot be written.
            ExchangeError: another site is out of reach.
        """
        release = self._release(comm)
        if self._is_spent:  # all sites know: nothing is asked again, of sites that may have left
            raise self.ledger.spent_error(release)
        if not self._is_agreed or self._begins or self.ledger.allowed(release) < 1:
            release = self._agree(comm)
        self.ledger.record(release)
        self._counted = release

    def show_parts(self) -> None:
        """Counts a step that was discarded, or started again, as if all had seen each site's part.

        A site whose backward raised, or whose batch does not fit the plan, adds nothing to sums:
        without its noise, or by the difference to the sums of the second attempt, they tell more of
        the others, but no more than each part by itself would. Open messages have been counted as
        that already.

        Where batches are of parts in turn, it is one turn more, of the part in this step. To know
        what others have added to step t is to know row t of C⁻¹ times their z, and that row is
        orthogonal to all columns of C but column t: nothing of the other turns is shown.
        """
        release = self._counted
        if release is not None and release.sums != "open" and release.sites > 1:
            beside = f"shown at {self.ledger.steps}" if self._has_turns else ""
            self.ledger.record(replace(release, sums="open", sequence=beside))

    def restart(self) -> None:
        """Has the sites compare before the next step, and begin a sequence with it."""
        self._is_agreed = self._is_spent = False
        self._sequence = ""

    # -- sequences --------------------------------------------------------------------------------

    @property
    def _has_turns(self) -> bool:
        return isinstance(self.sampling, CyclicPoisson)

    @property
    def _begins(self) -> bool:
        """True if the next step goes on behind none that this session has counted."""
        return self._has_turns and self.banded.sequence != self._sequence

    def _release(self, comm: Comm) -> Release:
        """Returns the next step's release; a sequence that begins has its name from the count."""
        sequence = self._sequence
        if self._begins:
            sequence = f"from {self.ledger.steps}"
        about = {"bands": self.banded.bands, "sequence": sequence}
        return Release(self.noise, self.sampling, comm.world_size, comm.sums, **about)

    # -- between the sites ------------------------------------------------------------------------

    def _agree(self, comm: Comm) -> Release:
        """Compares the ledgers, and sets the number of steps that all have room for."""
        error, room, release = None, _FAILED, self._release(comm)
        try:
            self.ledger.count_for(comm.sites[comm.rank].called)
            room = self.ledger.room(release)
        except (ImportError, ValueError) as raised:
            error = raised
        state = json.dumps(self.ledger.state_dict(), sort_keys=True).encode()
        own = _Word(digest(state), len(state), room, self._is_new, self._begins)
        told = [_Word(*words) for words in words_of_all(comm, own)]
        if len({one.state for one in told}) > 1:
            self._take_over(comm, state, told)
            return self._agree(comm)
        if len({one.begins for one in told}) > 1:
            self._sequence = ""
            return self._agree(comm)
        if error is not None:
            raise error
        _refuse_failed(comm, told)
        if all(one.is_new for one in told):
            self._check_batch(comm)
        self._is_new, self._is_agreed = False, True
        room = min(one.room for one in told)
        if not room:
            self._is_spent = True
            raise self.ledger.spent_error(release)
        self.ledger.allow(release, room)
        if self._begins:
            self._sequence = release.sequence
            self.banded.restart(release.sequence)
        return release

    def _take_over(self, comm: Comm, own: bytes, told: Sequence[_Word]) -> None:
        """Goes on from the ledger that has counted most.

        Raises:
            ValueError: another ledger has counted something else.
        """
        runs_S = _gathered(comm, own, told)
        most = max(runs_S, key=_steps)
        first = comm.sites[runs_S.index(most)]
        pairs = zip(comm.sites, runs_S, strict=True)
        if odd := [site for site, runs in pairs if not goes_on(most, runs)]:
            raise ValueError(
                f"the ledger of {called(odd)} has other releases "
                f"({told_sum(runs_S[odd[0]])}) than that of {first.called} ({told_sum(most)}): "
                f"begin with the ledger that this training has kept (file=, or that of its last "
                f"checkpoint), on every site"
            )
        if (mine := runs_S[comm.rank]) != most:
            _LOG.warning(
                "the ledger of %s had %s, that of %s has %s: all of these count from now on",
                comm.sites[comm.rank].called,
                told_sum(mine),
                first.called,
                told_sum(most),
            )
            self.ledger.take_over(most)

    def _check_batch(self, comm: Comm) -> None:
        """Compares `batch` with the sum of what sites draw; no site learns another's part.

        Raises:
            ValueError: all sites know what they draw, and it is not that.
        """
        own = [1.0, self.expected] if self.expected is not None else [0.0, 0.0]
        total = comm.all_reduce(torch.tensor(own, dtype=torch.float64, device=comm.device)).wait()
        known, expected = total.tolist()
        if round(known) < comm.world_size or abs(expected - self.batch) <= _NEAR * self.batch:
            return
        raise ValueError(
            f"og.Private: batch={self.batch:g}, but the samplers of all sites together draw "
            f"{expected:.6g} samples per step on average (rate x rows, added up over "
            f"{comm.world_size} sites): pass batch={expected:.6g} on every site"
        )

    # -- what it tells ----------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps counted so far."""
        return self.ledger.steps

    def spent(self, local: Collection[str]) -> PrivacySpent:
        """Returns what was released so far.

        Args:
            local: parameters that each site trains for itself.

        Raises:
            ValueError: ε is not to be had by the ledger's accountant.
        """
        return spent(self.ledger, self.noise, local)

    def figures(self) -> dict[str, Any]:
        """Returns fields of `events.Privacy`; ε by Rényi divergences, which take few milliseconds.

        Where there is none, `unknown` says why.
        """
        ledger, epsilon = self.ledger, dict[str, float]()
        unknown = missing("dp_accounting") or ""
        try:
            if not unknown:
                whom = ledger.observers
                epsilon = {who: ledger.epsilon(who, accountant="rdp") for who in whom}
        except (ImportError, ValueError) as error:
            unknown = str(error)
        about = {"delta": ledger.delta, "stop_at": ledger.stop_at, "against": ledger.against}
        return {"steps": ledger.steps, **about, "epsilon": epsilon, "unknown": unknown}


def _refuse_failed(comm: Comm, told: Sequence[_Word]) -> None:
    pairs = zip(comm.sites, told, strict=True)
    if failed := [site for site, one in pairs if one.room < 0]:
        raise RuntimeError(
            f"{called(failed)} could not count the next step in the ledger of privacy: the error "
            f"raised there says why. No site has made that step"
        )


def _gathered(comm: Comm, own: bytes, told: Sequence[_Word]) -> list[Sequence[Run]]:
    """Returns the releases in the ledgers of all sites.

    Raises:
        ExchangeError: a site sent something else.
    """
    pairs = list(zip(comm.sites, told, strict=True))
    for site, one in pairs:
        if not 0 < one.nbytes <= max(_MOST_BYTES, len(own)):
            raise ExchangeError(f"{site.called} announced a ledger of {one.nbytes} bytes")
    parts = comm.all_gather(as_tensor(own), [one.nbytes for one in told]).wait()
    texts = [part.cpu().numpy().tobytes() for part in parts]
    for (site, one), text in zip(pairs, texts, strict=True):
        if digest(text) != one.state:
            raise ExchangeError(f"the ledger of {site.called} is not as it was sent")
    return [runs_of(json.loads(text)) for text in texts]


def _steps(runs: Sequence[Run]) -> int:
    return sum(run.steps for run in runs)
