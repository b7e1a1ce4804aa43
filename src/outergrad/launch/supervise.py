"""Local sites that are started again when one fails: new processes, a new process group."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from outergrad.launch.errors import RecipeError, SiteError

_LONGEST = 1 << 10
"""Checkpoints after which a site that was lost again and again is tried once more."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is started.

    Attributes:
        sites: The numbers of the sites that take part.
        pause_after: Checkpoints after which they end, for the others to come back; None if all
            are there.
    """

    sites: tuple[int, ...]
    pause_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What to do about failures.

    Attributes:
        max_restarts: How many times all sites start again.
        min_sites: With at least so many the others go on without a site that is lost; None for
            never.
    """

    max_restarts: int = 0
    min_sites: int | None = None

    def check(self, sites: int) -> None:
        """Whether it fits.

        Raises:
            RecipeError: There cannot be so few sites, or so many.
        """
        if self.min_sites is not None and not 1 <= self.min_sites <= sites:
            raise RecipeError(f"--min-sites must be from 1 to the {sites} sites there are")


def supervise(
    run: Callable[[Attempt], bool], sites: int, restarts: Restarts, say: Callable[[str], None]
) -> None:
    """Starts the sites until their work is done.

    A site that is lost is taken back after the next checkpoint of the others; after two, four and
    so on, if it is lost time and again. Each such time there has been progress, so that it does
    not count as a restart.

    Args:
        run: Starts an attempt, waits for it, leaves no process; whether the work is done.
        sites: How many there should be.
        restarts: What to do about failures.
        say: Tells the user, in a line.

    Raises:
        RecipeError: The user must mend something: no restart would help.
        SiteError: The last failure, when there may be no further restart.
    """
    everyone = Attempt(sites=tuple(range(sites)))
    attempt, made, times = everyone, 0, Counter[int]()
    while True:
        try:
            if run(attempt):
                return
            absent = set(everyone.sites) - set(attempt.sites)
            say(f"taking back {_names(absent)} at this checkpoint")
            attempt = everyone
        except SiteError as error:
            times.update(error.lost)
            rest = _without(attempt, error, restarts, times)
            if rest is not None:
                say(f"{error}; going on without {_names(set(everyone.sites) - {*rest.sites})}")
                attempt = rest
                continue
            if made == restarts.max_restarts:
                raise
            made += 1
            say(f"{error}; starting again (restart {made} of {restarts.max_restarts})")
            attempt = everyone


def _without(
    attempt: Attempt, error: SiteError, restarts: Restarts, times: Counter[int]
) -> Attempt | None:
    """The others, if they are enough."""
    rest = tuple(site for site in attempt.sites if site not in error.lost)
    if restarts.min_sites is None or not error.lost or len(rest) < restarts.min_sites:
        return None
    tries = max(times[site] for site in error.lost)
    return Attempt(sites=rest, pause_after=min(1 << (tries - 1), _LONGEST))


def _names(sites: set[int]) -> str:
    return ", ".join(f"site {site}" for site in sorted(sites))
