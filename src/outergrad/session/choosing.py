"""Step timing for the chooser of methods (`og.Auto`), which all sites exchange."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from outergrad.comm.words import words_of_all
from outergrad.core.choosing import Chooser, Rows, Trial
from outergrad.core.errors import ExchangeError
from outergrad.core.model import Compressors, Model
from outergrad.core.sites import Site
from outergrad.core.transport import Comm, Work
from outergrad.messages.header import KNOWN, MAGIC, Header, sum_of_words

_LANE = 4
"""Lane of the transport, apart from the messages of steps, as votes are."""
_PER_UNIT = 1e9


class Figures:
    """Exchange of seconds between sites.

    Args:
        comm: the transport.
        fingerprint: of the session, the same on all sites.
    """

    def __init__(self, comm: Comm, fingerprint: int) -> None:
        self._comm, self._fingerprint = comm, fingerprint
        self._said: tuple[int, Work] | None = None

    def say(self, step: int, seconds: Sequence[float]) -> None:
        """Starts an all-gather of seconds, as many on every site, after the same step.

        Raises:
            ExchangeError: another site is lost.
        """
        numbers = [round(_PER_UNIT * s) for s in seconds]
        words = [MAGIC, self._fingerprint, step, self._comm.rank, *numbers]
        words.append(sum_of_words(words[KNOWN:]))
        sizes = [len(words)] * self._comm.world_size
        self._said = step, self._comm.all_gather(self._comm.control(words), sizes, lane=_LANE)

    @property
    def is_silent(self) -> bool:
        """True if no exchange is under way."""
        return self._said is None

    def heard(self) -> list[list[float]]:
        """Waits for the exchange under way; returns the seconds of all sites (S).

        Raises:
            ExchangeError: another site is lost, or sent something else.
        """
        assert self._said is not None
        (step, work), self._said = self._said, None
        parts = zip(work.wait(), self._comm.sites, strict=True)
        return [self._seconds(part.tolist(), step, site) for part, site in parts]

    def _seconds(self, words: Sequence[int], step: int, site: Site) -> list[float]:
        known, numbers, total = words[:KNOWN], words[KNOWN:-1], words[-1]
        if list(known) != [MAGIC, self._fingerprint, step, site] or min(numbers) < 0:
            raise ExchangeError(
                f"{site.called} sent something else than the seconds of its steps till {step}"
            )
        if total != sum_of_words(numbers):
            raise ExchangeError(f"the checksum of the seconds of {site.called} is wrong")
        return [number / _PER_UNIT for number in numbers]


_WIDTH = 256
_TIMES = 4


class Choosing:
    """Measurement of the steps of a session for its chooser.

    Args:
        chooser: is told of the steps.
        model: of the session.
        comm: the transport.
        fingerprint: of the session.

    Attributes:
        clock: returns the time, seconds.
    """

    def __init__(self, chooser: Chooser, model: Model, comm: Comm, fingerprint: int) -> None:
        self.chooser, self._model = chooser, model
        self._figures = Figures(comm, fingerprint)
        self.clock = time.perf_counter
        self._last: float | None = None

    def ended(self, step: int, headers: Sequence[Header]) -> Trial | None:
        """Takes the time of a shared step that is over; returns the trial that it decided, if any.

        All sites call it after the same step.

        Args:
            step: number of the step.
            headers: of all sites in the step.

        Raises:
            ExchangeError: another site is lost.
        """
        now = self.clock()
        seconds, self._last = now - (now if self._last is None else self._last), now
        trial = None
        if self.chooser.hears(step) and not self._figures.is_silent:
            trial = self.chooser.take(step, self._figures.heard(), self._rows(headers))
        said = self.chooser.ended(step, seconds)
        if said:
            self._figures.say(step, said)
        return trial

    def _rows(self, headers: Sequence[Header]) -> Rows:
        index = {slot: k for k, slot in enumerate(self._model.slots)}
        return {
            unit: [[header.uses[index[slot]].rows for slot in unit.slots] for header in headers]
            for unit in self._model.units
        }

    def restart(self) -> None:
        """Drops times and figures under way: a state is loaded, or the session ends."""
        self._last = None
        with suppress(ExchangeError):
            if not self._figures.is_silent:
                self._figures.heard()


def choosing_of(
    compressors: Compressors, model: Model, comm: Comm, fingerprint: int
) -> Choosing | None:
    """Returns the measurement for a session's chooser; None if there is nothing to choose."""
    if compressors.chooser is None or comm.world_size == 1 or not model.units:
        return None
    return Choosing(compressors.chooser, model, comm, fingerprint)


def measured_flops(comm: Comm) -> float:
    """Returns FLOP/s of the slowest machine, by products of small matrices; equal on all sites."""
    a = torch.ones(_WIDTH, _WIDTH, device=comm.device)
    least_s = min(_product_s(a) for _ in range(_TIMES))
    own = round(2 * _WIDTH**3 / max(least_s, 1e-9))
    slowest = min(theirs for (theirs,) in words_of_all(comm, [own]))
    return float(max(slowest, 1))


def _product_s(a: torch.Tensor) -> float:
    began = time.perf_counter()
    (a @ a)[0, 0].item()  # waits for the device
    return time.perf_counter() - began
