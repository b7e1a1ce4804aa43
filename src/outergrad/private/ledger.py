"""Ledger of privacy: what a training has released, and what that tells of a single row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple

from outergrad._whole_files import write_whole
from outergrad.core.errors import BudgetSpentError
from outergrad.core.packages import missing
from outergrad.core.transport import Sums
from outergrad.private.accounting import (
    ADJACENCIES,
    LARGEST,
    Accountant,
    Adjacency,
    check_delta,
    check_terms,
    epsilon,
)
from outergrad.private.observers import OBSERVERS, SUMS, Observer, noise_seen
from outergrad.private.sampling import CyclicPoisson, Fixed, Poisson, Sampling

_KINDS: dict[str, type[Sampling]] = {"poisson": Poisson, "cyclic": CyclicPoisson, "fixed": Fixed}


@dataclass(frozen=True)
class Release:
    """One step's clipped and noisy gradients, from the moment that they may be seen.

    Attributes:
        noise: σ, standard deviation of the noise in the sum over all sites, over the clip C. Each
            site adds σC/√S. 0 for none.
        sampling: how batches are drawn.
        sites: S, how many sites add noise.
        sums: who sees what a site sends: "masked" (nobody, as with `og.Star(blind=True)`),
            "trusted" (only the hub that adds up) or "open" (the other sites).
        bands: b of `og.Private(bands=...)`; noise in several bands needs `CyclicPoisson` batches of
            as many parts at least.
        sequence: `private.sequence`, with `CyclicPoisson`: steps in which parts have followed each
            other without a break. What comes after a break is another sequence.

    Raises:
        ValueError: a value is not allowed.
    """

    noise: float
    sampling: Sampling
    sites: int = 1
    sums: Sums = "open"
    bands: int = 1
    sequence: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise must be 0 or more, and finite, not {self.noise!r}")
        object.__setattr__(self, "noise", float(self.noise))  # equal releases have equal states
        if not isinstance(self.sampling, Sampling):
            raise ValueError(
                f"sampling must be Poisson(...), CyclicPoisson(...) or Fixed(...), not "
                f"{self.sampling!r}"
            )
        if self.sites < 1:
            raise ValueError(f"sites must be 1 or more, not {self.sites!r}")
        if self.sums not in SUMS:
            raise ValueError(f"sums must be one of {', '.join(SUMS)}, not {self.sums!r}")
        parts = self.sampling.parts if isinstance(self.sampling, CyclicPoisson) else 1
        if not 1 <= self.bands <= parts:
            raise ValueError(
                f"bands={self.bands}, with {self.sampling}: a row would be in batches that are "
                f"less than {self.bands} steps apart: draw batches by og.private."
                f"CyclicPoissonSampler(rows, rate, parts={self.bands})"
                if self.bands > 1
                else f"bands must be 1 or more, not {self.bands!r}"
            )
        if isinstance(self.sampling, CyclicPoisson) and not self.sequence:
            raise ValueError(f"sequence must be given with {self.sampling}: private.sequence")

    def __str__(self) -> str:
        sites = f"{self.sites} sites, {SUMS[self.sums]}" if self.sites > 1 else "1 site"
        bands = f" in {self.bands} bands" if self.bands > 1 else ""
        return f"noise {self.noise:.6g}{bands}, {self.sampling}, {sites}"


class Run(NamedTuple):
    """Equal releases, one after another.

    Attributes:
        release: what each of them was.
        steps: how many there were.
    """

    release: Release
    steps: int


UNLIMITED = 1 << 40
"""Room for steps where there is no budget."""


class _Room(NamedTuple):
    """Room in the budget for steps of the run that is going on.

    Attributes:
        release: what each of them is.
        fits: so many are known to be within it.
        exceeds: so many are known not to be; 0 if none are.
    """

    release: Release
    fits: int
    exceeds: int = 0


_DEFAULTS = {
    "stop_at": None,
    "against": "model",
    "accountant": "pld",
    "adjacency": "add_or_remove",
    "colluding": 1,
}


class Ledger:
    """Counts what a training releases, and tells ε at δ against those who may look at it.

    Choose one for every training whose privacy is to be stated. `og.Private(..., ledger=ledger,
    sampling=...)` has a session count its steps in it; for other trainings call `check` and
    `record` before each step. A step counts once its messages may have been sent, also if it is
    discarded then. A ledger never forgets: a state with fewer releases than it has counted changes
    nothing. Its statements hold for all steps that it was told of, and of these for their gradients
    alone ([what is not covered](../ledger.md)). Copies of objects that hold a ledger hold the same.

    dp-accounting computes ε, as upper bounds: `pip install 'dp-accounting>=0.6'`. Nothing else of
    the ledger needs it.

    Args:
        delta: δ, well below one over the number of rows.
        stop_at: budget: the largest ε that `check` lets a step reach; None for no limit.
        against: whose ε the budget is about: "model" (whoever gets the model), "site" or "hub".
        accountant: what computes ε: "pld" (privacy loss distributions, tighter, a second each; no
            more than ε = 100) or "rdp" (Rényi divergences, quicker).
        adjacency: what an observer cannot tell apart: a training with one row more or less
            ("add_or_remove"), or with one row in place of another ("replace", about twice the ε).
        colluding: how many sites, looking at another, put together what they know.
        file: where each release is written down before it counts, so that a training that goes
            back to an older checkpoint still has it; read if it is there. None to write nothing.

    Raises:
        ValueError: an argument is not allowed, or the file holds something else.
        OSError: the file cannot be read.
    """

    def __init__(
        self,
        delta: float,
        *,
        stop_at: float | None = None,
        against: Observer = "model",
        accountant: Accountant = "pld",
        adjacency: Adjacency = "add_or_remove",
        colluding: int = 1,
        file: str | Path | None = None,
    ) -> None:
        check_delta(delta)
        check_terms(accountant, adjacency)
        if stop_at is not None and not stop_at > 0:
            raise ValueError(f"stop_at must be above 0, not {stop_at!r}")
        if against not in OBSERVERS:
            raise ValueError(f"against must be one of {', '.join(OBSERVERS)}, not {against!r}")
        if colluding < 1:
            raise ValueError(f"colluding must be 1 or more, not {colluding!r}")
        self.delta, self.stop_at, self.colluding = delta, stop_at, colluding
        self.against: Observer = against
        self.accountant: Accountant = accountant
        self.adjacency: Adjacency = adjacency
        self._runs: list[Run] = []
        self._room: _Room | None = None
        self._allowed: _Room | None = None
        self._site: str | None = None
        self._file = None if file is None else Path(file)
        if self._file is not None and self._file.exists():
            self._read(self._file)

    def __repr__(self) -> str:
        """Shows the settings that have to be given, and those that differ from the defaults."""
        shown = {name: getattr(self, name) for name in _DEFAULTS}
        told = [f"{name}={v!r}" for name, v in shown.items() if v != _DEFAULTS[name]]
        return f"Ledger({', '.join([f'delta={self.delta!r}', *told])})"

    def __copy__(self) -> Ledger:
        return self

    def __deepcopy__(self, memo: object) -> Ledger:
        return self  # what a copy counts would be missing here

    @property
    def runs(self) -> tuple[Run, ...]:
        """All releases in order, equal ones that follow each other together."""
        return tuple(self._runs)

    @property
    def steps(self) -> int:
        """Number of released steps."""
        return sum(run.steps for run in self._runs)

    # -- counting ---------------------------------------------------------------------------------

    def record(self, release: Release, steps: int = 1) -> None:
        """Counts a step, or several; call it before the first message of the step is sent.

        Raises:
            ValueError: `steps` is negative, or the release protects another unit than those before.
            OSError: the ledger's file cannot be written; nothing was counted.
        """
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, not {steps!r}")
        if steps == 0:
            return
        runs = self._with(release, steps)
        if self._file is not None:
            write_whole(self._file, json.dumps(_state(runs)) + "\n")
        if len(runs) > len(self._runs):
            self._room = None  # it was about the run before
            if self._allowed is not None and self._allowed.release != release:
                self._allowed = None
        self._runs = runs

    def check(self, release: Release) -> None:
        """Checks that the budget has room for one more step; call it before each.

        What it says follows from what all sites have counted alike, so all sites stop together.
        Most calls compare two numbers: how many steps fit is looked for ahead, in growing strides.

        Raises:
            BudgetSpentError: it has not.
            ImportError: dp-accounting is not installed.
            ValueError: ε is not to be had for such a step.
        """
        if not self.room(release):
            raise self.spent_error(release)

    def room(self, release: Release) -> int:
        """Returns how many more steps like this one are known to be within the budget.

        0 only if not one of them is; else some of those that fit, as far as it has looked ahead.

        Raises:
            ImportError: dp-accounting is not installed.
            ValueError: ε is not to be had for such a step.
        """
        if self.stop_at is None:
            return UNLIMITED
        done = self._latest(release)
        if self._room is None or self._room.release != release or self._room.fits < done:
            self._room = _Room(release, done)
        if done == self._room.fits:
            self._room = self._look_ahead(self._room)
        return self._room.fits - done

    def count_for(self, site: str) -> None:
        """Notes the site whose steps a session counts in it.

        Raises:
            ValueError: it counts for another one, as where sites are threads of one process.
        """
        if self._site not in (None, site):
            raise ValueError(
                f"one Ledger for {self._site} and {site} would count each step twice: give every "
                f"site a Ledger of its own, with a file of its own, and an og.Private of its own"
            )
        self._site = site

    def allow(self, release: Release, steps: int) -> None:
        """Notes that the sites have agreed on so many more steps like this one, in this run."""
        self._allowed = _Room(release, self._latest(release) + steps)

    def allowed(self, release: Release) -> int:
        """Returns how many of the steps that the sites have agreed on are left."""
        if self._allowed is None or self._allowed.release != release:
            return 0
        return self._allowed.fits - self._latest(release)

    def _look_ahead(self, room: _Room) -> _Room:
        """Finds room for as many steps again, or else the last one that fits."""
        if room.exceeds == room.fits + 1:
            return room
        release, fits, exceeds = room.release, room.fits, 2 * room.fits + 1
        if self._fits(release, exceeds):
            return _Room(release, exceeds)
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if self._fits(release, middle) else (fits, middle)
        return _Room(release, fits, exceeds)

    def _fits(self, release: Release, steps: int) -> bool:
        """Tells if so many steps like this one, in the run that is going on, are within budget."""
        assert self.stop_at is not None
        more = self._with(release, steps - self._latest(release))
        return self._epsilon(more, self.against) <= self.stop_at

    def _latest(self, release: Release) -> int:
        """Returns how many of the last steps were just like this one."""
        return self._runs[-1].steps if self._runs and self._runs[-1].release == release else 0

    def _with(self, release: Release, steps: int) -> list[Run]:
        if self._runs and _unit(self._runs[-1].release) != _unit(release):
            raise ValueError(
                f"this ledger has counted releases per {_unit(self._runs[-1].release)}, and this "
                f"is one per {_unit(release)}: neither protects the other's unit as much, so give "
                f"it a ledger of its own"
            )
        latest = self._latest(release)
        before = self._runs[:-1] if latest else self._runs
        return [*before, Run(release, latest + steps)]

    def spent_error(self, release: Release) -> BudgetSpentError:
        """Returns the error for a step like this, which the budget has no room for."""
        assert self.stop_at is not None
        spent = self.epsilon(self.against)
        next_one = self._epsilon(self._with(release, 1), self.against)
        return BudgetSpentError(
            f"the budget of privacy is spent: {self.steps:,} steps have taken ε = "
            f"{_told(spent, 6)} of {self.stop_at:g} at δ = {self.delta:g} against "
            f"{OBSERVERS[self.against]} (by {self.accountant.upper()}), and one more ({release}) "
            f"would take it to {_told(next_one, 6)}: end the training here, on all sites; more "
            f"steps need more noise or a lower rate from the start (og.private.noise_for), or "
            f"another stop_at=",
            spent,
            self.stop_at,
            self.steps,
        )

    # -- what it tells ----------------------------------------------------------------------------

    def epsilon(
        self,
        observer: Observer = "model",
        *,
        delta: float | None = None,
        accountant: Accountant | None = None,
    ) -> float:
        """Returns an upper bound of ε for all that was released.

        Args:
            observer: who looks: "model" for whoever gets the model, "site" for another site,
                "hub".
            delta: δ, if not the ledger's.
            accountant: "pld" or "rdp", if not the ledger's.

        Raises:
            ImportError: dp-accounting is not installed.
            ValueError: there is no such observer, or the accountant has no bound.
        """
        return self._epsilon(self._runs, observer, delta, accountant)

    def _epsilon(
        self,
        runs: Sequence[Run],
        observer: Observer,
        delta: float | None = None,
        accountant: Accountant | None = None,
    ) -> float:
        of_several = any(run.release.sites > self.colluding for run in runs)
        spent: Counter[tuple[float, Sampling]] = Counter()
        for release, steps in _in_turn(runs):
            noise = self._noise(release, observer, of_several)
            spent[noise, release.sampling] += release.sampling.turns(steps)
        return epsilon(
            spent,
            self.delta if delta is None else delta,
            accountant=accountant or self.accountant,
            adjacency=self.adjacency,
        )

    def _noise(self, release: Release, observer: Observer, of_several: bool) -> float:
        """Returns what the observer does not know of a release's noise.

        In a training of several sites some may be lost. Then those that are left collude, and if
        one goes on alone, others see no more of its steps than the model.
        """
        alone = observer == "site" and of_several and release.sites == 1
        colluding = min(self.colluding, release.sites - 1) if of_several else self.colluding
        return noise_seen(
            release.noise,
            "model" if alone else observer,
            sites=release.sites,
            sums=release.sums,
            colluding=colluding,
        )

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Observers against whom ε can be told: of one site alone there is no other."""
        several = any(run.release.sites > self.colluding for run in self._runs)
        return ("model", "site", "hub") if several else ("model",)

    def __str__(self) -> str:
        units = {_unit(run.release) for run in self._runs}
        unit = units.pop() if len(units) == 1 else "sample"
        unit = "row" if unit == "sample" else unit
        neighbours = ADJACENCIES[self.adjacency].replace("row", unit)
        lines = [f"ε at δ = {self.delta:g}, {neighbours}, after {self.steps:,} released steps"]
        if told := missing("dp_accounting"):
            lines.append(told)
        else:
            lines += [f"{'against':<28}{'by PLD':>10}{'by RDP':>10}", *self._rows()]
        lines += [f"{run.steps:,} x {run.release}" for run in self._runs]
        return "\n".join(lines)

    def _rows(self) -> list[str]:
        rows = []
        for observer in self.observers:
            cells = [self._cell(observer, "pld"), self._cell(observer, "rdp")]
            rows.append(f"{OBSERVERS[observer]:<28}{cells[0]:>10}{cells[1]:>10}")
        return rows

    def _cell(self, observer: Observer, accountant: Accountant) -> str:
        try:
            return _told(self.epsilon(observer, accountant=accountant))
        except ValueError:  # this accountant has no bound for it
            return "-"

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what was released, as plain numbers and text: `og.Checkpoints(ledger=ledger)`."""
        return _state(self._runs)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what another ledger, or this one before, had counted.

        Of two states, of which one goes on where the other ends, the longer counts: what was
        released since a checkpoint stays released.

        Raises:
            ValueError: it is no state of a ledger, or has other releases than this one.
        """
        runs = runs_of(state_dict)
        if goes_on(self._runs, runs):
            return
        if not goes_on(runs, self._runs):
            raise ValueError(
                f"the state has other releases ({told_sum(runs)}) than this ledger "
                f"({told_sum(self._runs)}): load it into a new Ledger, before its first step"
            )
        self.take_over(runs)

    def take_over(self, runs: Sequence[Run]) -> None:
        """Goes on from these releases, which must begin with all that it has counted."""
        assert goes_on(runs, self._runs)
        self._runs, self._room, self._allowed = list(runs), None, None

    def _read(self, file: Path) -> None:
        try:
            self.load_state_dict(json.loads(file.read_text()))
        except ValueError as error:
            raise ValueError(f"file={str(file)!r} holds no ledger: {error}") from error


def _unit(release: Release) -> str:
    return getattr(release.sampling, "unit", "sample")


def _in_turn(runs: Sequence[Run]) -> list[Run]:
    """Returns runs with those put together in which parts go on in turn, or that have no parts.

    Where other releases of a sequence lie between two runs, parts had their turns in these, and the
    same part may be the first in both.
    """
    found: list[Run] = []
    latest: dict[tuple[type[Sampling], str], int] = {}
    place: dict[Release, int] = {}
    for release, steps in runs:
        of = type(release.sampling), release.sequence
        before = place.get(release)
        goes_on = not isinstance(release.sampling, CyclicPoisson) or latest.get(of) == before
        if before is not None and goes_on:
            found[before] = Run(release, found[before].steps + steps)
        else:
            before = len(found)
            found.append(Run(release, steps))
        place[release] = latest[of] = before
    return found


def _state(runs: Sequence[Run]) -> dict[str, Any]:
    return {"runs": [_run_state(run) for run in runs]}


def _run_state(run: Run) -> dict[str, Any]:
    release = asdict(run.release)
    kind = next(name for name, of in _KINDS.items() if isinstance(run.release.sampling, of))
    return {**release, "sampling": {"kind": kind, **release["sampling"]}, "steps": run.steps}


def runs_of(state: Mapping[str, Any]) -> list[Run]:
    """Returns the releases of a state.

    Raises:
        ValueError: it is none.
    """
    try:
        return [_run(dict(run)) for run in state["runs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no state of a ledger: {error!r}") from error


def _run(state: dict[str, Any]) -> Run:
    sampling = dict(state.pop("sampling"))
    steps = int(state.pop("steps"))
    return Run(Release(sampling=_KINDS[sampling.pop("kind")](**sampling), **state), steps)


def goes_on(longer: Sequence[Run], shorter: Sequence[Run]) -> bool:
    """Returns whether one begins with all releases of the other."""
    if not shorter:
        return True
    before, last = shorter[:-1], shorter[-1]
    if len(longer) < len(shorter) or list(longer[: len(before)]) != list(before):
        return False
    there = longer[len(before)]
    return there.release == last.release and there.steps >= last.steps


def told_sum(runs: Sequence[Run]) -> str:
    """Returns how many releases there are, in words."""
    return f"{sum(run.steps for run in runs):,} steps in {len(runs):,} runs"


def _told(value: float, digits: int = 4) -> str:
    return f"over {LARGEST:g}" if isinf(value) else f"{value:.{digits}g}"
