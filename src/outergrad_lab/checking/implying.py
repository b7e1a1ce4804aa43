"""Sites that apply a step as `forwarding.py` has it, and say so by the messages of the next one."""

from __future__ import annotations

from functools import partial

from outergrad.comm.standing import Standing
from outergrad.core.errors import ExchangeError, Failure
from outergrad.step.agreement import TROUBLE
from outergrad_lab.checking.agreement import CALL_S, farewell_key
from outergrad_lab.checking.forwarding import ForwardingSite
from outergrad_lab.checking.network import StoreGoneError
from outergrad_lab.checking.world import Waiting

_POLL_S = 0.02


class ImplyingSite(ForwardingSite):
    """Says nothing of a step: its messages of the next one imply that it has applied it.

    No message more than the gradients need; at the end all look into the store for each other, and
    the one with which it ends waits until all have.
    """

    def _tell(self, step: int) -> Waiting[None]:
        yield from ()

    def _count(self, steps: int) -> Waiting[None]:
        yield from ()
        if not self._frozen:
            self._kept = None

    def _hear_of_ends(self, steps: int) -> Waiting[None]:
        """Says in the store how many steps it has made, and reads it of the others there.

        A site that is missing may itself wait for one that is lost: it will give up before.
        """
        until, missing = self.world.now + 2 * self.patience_s, set(self.others)
        try:
            tell = lambda: self.store.set(_made_key(self.rank), str(steps))  # noqa: E731
            yield from self.store.call(self.process, tell, CALL_S)
            while missing:
                is_over = self.world.now > until  # before it looks: it may be stopped between
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
        """Those that have made as many steps, by their own word or that of their end."""
        told = {site: self.store.values.get(_made_key(site)) for site in sites}
        ends = {site: self.store.values.get(farewell_key(site)) for site in sites}
        words = {site: None if text is None else Standing.of(text) for site, text in ends.items()}
        done = {site for site, word in words.items() if word is not None and word.made == steps}
        return done | {site for site, made in told.items() if made == str(steps)}


def _read_key(site: int) -> str:
    return f"read {site}"


def _made_key(site: int) -> str:
    return f"made {site}"
