"""`og.Star`: the transport of sites that reach each other through a hub."""

from __future__ import annotations

import os
import sys
import warnings
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from outergrad.core.addresses import read_address
from outergrad.core.packages import require

if TYPE_CHECKING:
    from outergrad.star.authority import Kit
    from outergrad.star.comm import StarComm
    from outergrad.star.dial import Dialler
    from outergrad.star.line import Line
    from outergrad.star.sealing import Seal


class NoRunError(RuntimeError):
    """A run around a hub did not begin: the hub is out of reach, refuses, or sites did not come."""


def wait_until_ready(line: Line, wait_s: float) -> None:
    """Waits until all sites are connected, or the sites that train admit this one.

    Raises:
        NoRunError: some have not come in time, or the hub cannot be reached.
    """
    with line.waits_for_others(wait_s):
        if line.wait_for(lambda: line.is_ready or line.invitation is not None, wait_s):
            return
    if line.failure is not None:
        raise NoRunError(str(line.failure)) from line.failure
    raise NoRunError(line.snapshot().who_did_not_come(wait_s))


def exchange_texts(
    line: Line, name: str, text: str, wait_s: float, *, of_gone: bool = True
) -> dict[int, str]:
    """Leaves a text for all other sites; returns those that they leave under its name, by rank.

    Args:
        line: of this process.
        name: of the texts, the same on all sites.
        text: of this site.
        wait_s: timeout, seconds.
        of_gone: whether it is an error if a site is gone without a text.

    Raises:
        RuntimeError: a text has not come.
    """
    line.leave_text(name, text)
    others = [rank for rank in range(len(line.names)) if rank != line.rank]

    def missing() -> set[int]:
        return {rank for rank in others if (rank, name) not in line.texts}

    def is_over() -> bool:
        late = missing()
        return late <= line.gone.keys() or (of_gone and bool(late & line.gone.keys()))

    line.wait_for(is_over, wait_s)
    late = missing()
    if late and (of_gone or not late <= line.gone.keys()):
        names = ", ".join(line.names[rank] for rank in sorted(late & line.gone.keys() or late))
        raise RuntimeError(f"no word of {names} within {wait_s:g} s, or before they went")
    return {rank: line.texts[rank, name] for rank in others if rank not in late}


TIMEOUT_S = 30.0
WAIT_S = 600.0
WhenLost = Literal["raise", "go on"]
FEWEST_SITES = 2


_ALONE = (
    "og.Star: min_sites=1: a site that is left alone goes on, and learns from its own data alone "
    "until another one is back"
)


@dataclass(eq=False)
class Star:
    """Sites around a hub (`outergrad hub serve`), to which each dials out, with mutual TLS.

    All sessions of a process with the same hub and kit share one connection.

    Args:
        hub: host and port, as "hub.example.org:8443" or "[2001:db8::1]:8443"; None for those in
            the kit.
        kit: file that `outergrad hub invite SITE` has written for this site; None for the file that
            `outergrad site --kit` was given.
        wait_s: seconds to wait until all sites have come.
        blind: whether the hub must not read what it relays and sums. Sites then encrypt messages
            for each other, and add masks to what the hub sums. Floats are rounded for that
            (docs/institutions.md).
        when_lost: "raise" an `og.SiteLostError` on the others when a site stays away, or "go on"
            without it. The step under way then counts on all sites that are left, or on none. All
            of them raise `og.SitesChangedError` once, in this step if it counts on none and in the
            next one otherwise, and go on.
        min_sites: least number of sites that go on; with fewer, all raise. With 1, a site that is
            left alone goes on by its own data until others come back: a warning says so.

    Raises:
        ValueError: a setting is not valid.
        TypeError: `hub` or `kit` is of another type.
    """

    hub: str | None = None
    kit: str | os.PathLike[str] | None = None
    wait_s: float = WAIT_S
    blind: bool = False
    when_lost: WhenLost = "raise"
    min_sites: int = FEWEST_SITES
    settings: Set[str] = field(default=frozenset({"timeout"}), init=False, repr=False)
    _line: _Line | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the settings."""
        for name, value in (("hub", self.hub), ("kit", self.kit)):
            kinds = str if name == "hub" else str | os.PathLike
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"og.Star: {name}={value!r}: pass a text, or None")
        if self.hub is not None:
            read_address(self.hub, called="og.Star: hub=")
        if type(self.wait_s) not in (int, float) or not 0 < self.wait_s < float("inf"):
            raise ValueError(f"og.Star: wait_s={self.wait_s!r}: pass seconds above 0")
        if type(self.blind) is not bool:
            raise ValueError(f"og.Star: blind={self.blind!r}: pass True or False")
        if self.when_lost not in get_args(WhenLost):
            raise ValueError(f"og.Star: when_lost={self.when_lost!r}: pass 'raise' or 'go on'")
        if type(self.min_sites) is not int or self.min_sites < 1:
            raise ValueError(f"og.Star: min_sites={self.min_sites!r}: pass 1 or more")
        if self.min_sites < FEWEST_SITES and self.when_lost == "go on":
            warnings.warn(_ALONE, stacklevel=3)  # behind __init__

    def open(
        self, device: torch.device, *_: Any, timeout: timedelta | None = None, **__: Any
    ) -> StarComm:
        """Opens a session on the line of this process.

        Args:
            device: of the tensors that will be sent.
            timeout: of a message.

        Raises:
            ValueError: the kit cannot be read, or a site differs in `blind`.
            RuntimeError: the hub cannot be reached, refuses this site, or other sites do not come.
        """
        patience_s = TIMEOUT_S if timeout is None else timeout.total_seconds()
        if self._line is None:
            self._line = _line_of(self, patience_s)
        self._line = self._line.latest
        return self._line.open(device, patience_s)

    def connected(self, patience_s: float) -> Held:
        """Returns this process's line, once all sites are connected: for process groups.

        Args:
            patience_s: seconds that the hub may be out of reach.

        Raises:
            ValueError: the kit cannot be read, or a site differs in `blind`.
            RuntimeError: the hub cannot be reached, refuses this site, or other sites do not come.
        """
        if self._line is None:
            self._line = _line_of(self, patience_s)
        wait_until_ready(self._line.line, self.wait_s)
        is_begun = self._line.line.is_ready  # else this site comes to others that train
        seal = self._line.seal(patience_s) if is_begun else None
        return Held(self, self._line.line, seal, self._line.way)

    def close(self) -> None:
        """Leaves, when all that was sent has arrived. A process that ends does it by itself."""
        if self._line is not None:
            self._line.latest.dialler.finish()


@dataclass(frozen=True)
class Held:
    """A line of this process, alive as long as this is.

    Attributes:
        star: transport, whose sessions share the line.
        line: to the hub.
        seal: keys of this site, if the hub must not read what it relays and sums.
        way: how messages travel, in words.
    """

    star: Star
    line: Line
    seal: Seal | None
    way: str


class _Line:
    """The line of a process, which ends with the last reference to it.

    Args:
        star: settings of the user.
        kit: of the site.
        patience_s: seconds that the hub may be out of reach.
        line: line of the new run, if sites go on from an earlier run.
        coming: names of the sites that did not take part in the earlier run.
    """

    def __init__(
        self,
        star: Star,
        kit: Kit,
        patience_s: float,
        line: Line | None = None,
        coming: Sequence[str] = (),
    ) -> None:
        from outergrad.star.dial import Dialler
        from outergrad.star.line import Line

        self._line, self._star, self._kit = line or Line(), star, kit
        self._met, self._seal, self._patience_s = False, None, patience_s
        self._next: _Line | None = None
        self._coming = tuple(coming)
        self._hub = str(read_address(star.hub or kit.hub, called=f"the kit of {kit.site}: hub="))
        self.dialler: Dialler = Dialler(self._line, self._hub, kit, patience_s)
        end = weakref.finalize(self, self.dialler.end)
        end.atexit = False  # `leave_all_stars` ends the dialler then

    @property
    def line(self) -> Line:
        """The line to the hub."""
        return self._line

    @property
    def latest(self) -> _Line:
        """This line, or the one by which its site has gone on with other sites."""
        return self if self._next is None else self._next.latest

    @property
    def min_sites(self) -> int | None:
        """Least number of sites that go on without others; None if a lost site ends the run."""
        return self._star.min_sites if self._star.when_lost == "go on" else None

    @property
    def way(self) -> str:
        """Description of how messages travel, for people."""
        way = f"a hub at {self._hub}, over mutual TLS; "
        if self._star.blind:
            how = "sites encrypt for each other (X25519, AES-GCM) and mask sums (AES-CTR)"
            return f"{way}{how}: the hub cannot read it"
        return f"{way}the hub could read what passes through it"

    def go_on(self, sites: Sequence[int], coming: Sequence[str] = ()) -> _Line:
        """Begins a new line, to these sites and to those that are coming."""
        names = [self._line.names[site] for site in sites]
        return self._continued(self._line.run, [*names, *coming], coming)

    def _continued(self, run: int, names: Sequence[str], coming: Sequence[str]) -> _Line:
        from outergrad.star.line import Line

        again = Line(run, names)
        self._next = _Line(self._star, self._kit, self._patience_s, again, coming)
        for key in [key for key, known in _lines.items() if known is self]:
            _lines[key] = self._next
        return self._next

    @property
    def is_over(self) -> bool:
        """True if the line cannot be used any more."""
        return self._line.has_failed or self._line.has_left

    def open(self, device: torch.device, patience_s: float) -> StarComm:
        from outergrad.star.comm import StarComm

        wait_until_ready(self._line, self._star.wait_s)
        if self._line.invitation is not None and not self._line.is_ready:
            comm = self._taken_in(*self._line.invitation).open(device, patience_s)
            self.dialler.end()
            return comm
        about = (self.seal(patience_s), self.min_sites, self.way)
        comm = StarComm(self._line, self, device, patience_s, *about)
        comm.coming = [self._line.names.index(name) for name in self._coming]
        return comm

    def seal(self, patience_s: float) -> Seal | None:
        """Returns the keys of this site, on which all sites agree first; None of none."""
        if not self._met:
            self._seal, self._met = self._agree(patience_s), True
        return self._seal

    def _taken_in(self, run: int, names: Sequence[str]) -> _Line:
        """Begins a new line to the sites that train, which admit this one."""
        known = self._star.when_lost == "go on"
        if not known:
            raise RuntimeError("the others train: pass og.Star(when_lost='go on') to be taken in")
        return self._continued(run, names, [self._kit.site])

    def sealed(self, comm: StarComm) -> StarComm:
        """Returns encrypted collectives on the same line; all sites have to call it together."""
        from outergrad.star.comm import StarComm

        seal = self._seal or self._seals("handing over", comm.patience_s)
        sealed = StarComm(self._line, self, comm.device, comm.patience_s, seal)
        sealed.coming = comm.coming
        return sealed

    def _agree(self, patience_s: float) -> Seal | None:
        """Agrees with all sites on whether to encrypt, and on the keys."""
        line = self._line
        seal = self._new_seal() if self._star.blind else None
        own = "" if seal is None else seal.announcement()
        first = line.epoch == 0  # in a continued run, the first step finds that a site is lost
        told = exchange_texts(line, "keys", own, patience_s, of_gone=first)
        if len({bool(one) for one in (own, *told.values())}) > 1:
            told = {line.rank: own, **told}
            names = sorted(line.names[rank] for rank, one in told.items() if one)
            raise ValueError(
                f"og.Star has blind=True on {', '.join(names)} alone: pass the same on every site, "
                f"or blind=1 in every address"
            )
        if seal is not None:
            keys = exchange_texts(line, "sender keys", seal.meet(told), patience_s, of_gone=first)
            seal.learn(keys)
        return seal

    def _new_seal(self) -> Seal:
        from outergrad.star.sealing import Seal

        return Seal(self._kit, self._line.names, self._line.rank, self._line.run)

    def _seals(self, what: str, patience_s: float) -> Seal:

        seal, line = self._new_seal(), self._line
        told = exchange_texts(line, f"{what}: keys", seal.announcement(), patience_s)
        seal.learn(exchange_texts(line, f"{what}: sender keys", seal.meet(told), patience_s))
        return seal


KIT_VARIABLE = "OUTERGRAD_KIT"
_lines: weakref.WeakValueDictionary[tuple[str, str, bool], _Line] = weakref.WeakValueDictionary()
"""Lines of this process, one per site: the hub would take a second one for a new process."""


def _line_of(star: Star, patience_s: float) -> _Line:
    """Returns the line for these settings, a new one if there is none that can be used."""
    kit = star.kit or os.environ.get(KIT_VARIABLE) or _missing_kit()
    key = star.hub or "", os.path.realpath(kit), star.blind
    line = _lines.get(key)
    if line is None or line.latest.is_over:
        require("grpc", "cryptography")
        from outergrad.star.authority import read_kit

        line = _lines[key] = _Line(star, read_kit(kit), patience_s)
    return line


def leave_all_stars() -> None:
    """Leaves, on all lines of this process, when all that was sent has arrived."""
    dial = sys.modules.get("outergrad.star.dial")
    if dial is not None:
        dial.finish_all()


def _missing_kit() -> str:
    raise ValueError(
        "og.Star needs kit=, the file that `outergrad hub invite SITE` has written for this site"
    )
