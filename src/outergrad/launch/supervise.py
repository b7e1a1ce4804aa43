"""Restarts of local sites after a failure, with new processes and a new process group."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from outergrad.launch.errors import RecipeError, SiteError

_LONGEST = 1 << 10
"""Most checkpoints after which a site that was lost repeatedly is tried again."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the sites.

    Attributes:
        sites: Numbers of the sites that take part.
        pause_after: Checkpoints after which the sites end, so that the others can come back; None
            if all are there.
    """

    sites: tuple[int, ...]
    pause_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Policy for failures.

    Attributes:
        max_restarts: How many times all sites start again.
        min_sites: Least number of sites that go on without a lost site; None: they never do.
    """

    max_restarts: int = 0
    min_sites: int | None = None

    def check(self, sites: int) -> None:
        """Checks `min_sites` against the number of sites.

        Raises:
            RecipeError: It is not from 1 to the number of sites.
        """
        if self.min_sites is not None and not 1 <= self.min_sites <= sites:
            raise RecipeError(f"--min-sites must be from 1 to the {sites} sites there are")


def supervise(
    run: Callable[[Attempt], bool], sites: int, restarts: Restarts, say: Callable[[str], None]
) -> None:
    """Starts the sites until their work is done.

    A lost site is taken back after the next checkpoint of the others; if it is lost repeatedly,
    after two, four and so on. Each such time there has been progress, so that it does not count
    as a restart.

    Args:
        run: Starts an attempt, waits for it and leaves no process; returns whether the work is
            done.
        sites: Full number of sites.
        restarts: Policy for failures.
        say: Prints a line for the user.

    Raises:
        RecipeError: The user made a mistake: no restart would help.
        SiteError: The last failure, when no further restart is allowed.
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
    """Returns an attempt without the lost sites; None if that is not allowed."""
    rest = tuple(site for site in attempt.sites if site not in error.lost)
    if restarts.min_sites is None or not error.lost or len(rest) < restarts.min_sites:
        return None
    tries = max(times[site] for site in error.lost)
    return Attempt(sites=rest, pause_after=min(1 << (tries - 1), _LONGEST))


def _names(sites: set[int]) -> str:
    return ", ".join(f"site {site}" for site in sorted(sites))
