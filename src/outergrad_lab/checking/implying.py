"""Sites that apply a step as in `forwarding.py`, and report it by the messages of the next one."""

from __future__ import annotations

from functools import partial

from outergrad.comm.failure_report import FailureReport
from outergrad.commit.agreement import TROUBLE
from outergrad.core.errors import ExchangeError, Failure
from outergrad_lab.checking.agreement import CALL_S, farewell_key
from outergrad_lab.checking.forwarding import ForwardingSite
from outergrad_lab.checking.network import StoreGoneError
from outergrad_lab.checking.world import Waiting

_POLL_S = 0.02


class ImplyingSite(ForwardingSite):
    """A site that sends no votes: its messages of the next step imply that it has applied a step.

    It sends no more messages than the gradients need. At the end all sites look into the store for
    each other, and the site that holds the store waits until all have done so.
    """

    def _tell(self, step: int) -> Waiting[None]:
        yield from ()

    def _count(self, steps: int) -> Waiting[None]:
        yield from ()
        if not self._frozen:
            self._kept = None

    def _hear_of_ends(self, steps: int) -> Waiting[None]:
        """Writes to the store how many steps this site has made, and waits for the others' numbers.

        A missing site may itself wait for a lost one: it aborts within twice the patience.
        """
        until, missing = self.world.now + 2 * self.patience_s, set(self.others)
        try:
            tell = lambda: self.store.set(_made_key(self.rank), str(steps))  # noqa: E731
            yield from self.store.call(self.process, tell, CALL_S)
            while missing:
                is_over = self.world.now > until  # read before the call, which may outlast `until`
                look = partial(self._have_made, missing, steps)
                missing -= yield from self.store.call(self.process, look, CALL_S)
                if self._frozen or (missing and TROUBLE in self.store.values):
                    raise ExchangeError("the others gave up", kind=Failure.CLOSED)
                if missing and is_over:
                    raise ExchangeError("silent", sorted(missing), kind=Failure.TIMEOUT)
                if missing:
                    yield self.world.now + _POLL_S
            read = lambda: self.store.set(_read_key(self.rank), True)  # noqa: E731
            yield from self.store.call(self.process, read, CALL_S)
        except StoreGoneError:  # its host has ended
            self.ending.compared = not missing
            return
        if self.rank == self.store.host:
            yield from self._stay_for_readers()

    def _stay(self) -> Waiting[None]:
        yield from ()

    def _stay_for_readers(self) -> Waiting[None]:
        until, keys = self.world.now + self.patience_s, [_read_key(other) for other in self.others]
        while self.world.now < until and not self._frozen:
            if all(key in self.store.values for key in keys):
                return
            yield until

    def _have_made(self, sites: set[int], steps: int) -> set[int]:
        """Returns the sites that have made as many steps, by their numbers or farewells."""
        told = {site: self.store.values.get(_made_key(site)) for site in sites}
        ends = {site: self.store.values.get(farewell_key(site)) for site in sites}
        words = {
            site: None if text is None else FailureReport.of(text) for site, text in ends.items()
        }
        done = {site for site, word in words.items() if word is not None and word.made == steps}
        return done | {site for site, made in told.items() if made == str(steps)}


def _read_key(site: int) -> str:
    return f"read {site}"


def _made_key(site: int) -> str:
    return f"made {site}"
