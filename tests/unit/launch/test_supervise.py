"""What is started again after which failure."""

from __future__ import annotations

import pytest

from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.supervise import Attempt, Restarts, supervise


def failure(*lost: int) -> SiteError:
    error = SiteError("it failed")
    error.lost = frozenset(lost)
    return error


class Sites:
    """Attempts end as they are told."""

    def __init__(self, *ends):
        self.ends, self.attempts, self.said = list(ends), [], []

    def run(self, attempt: Attempt) -> bool:
        self.attempts.append((attempt.sites, attempt.pause_after))
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def supervised(self, **restarts) -> Sites:
        supervise(self.run, 3, Restarts(**restarts), self.said.append)
        return self


ALL = ((0, 1, 2), None)


def test_what_succeeds_runs_once():
    sites = Sites(True).supervised()
    assert (sites.attempts, sites.said) == ([ALL], [])


def test_failures_start_all_again_as_often_as_allowed():
    sites = Sites(failure(1), failure(), True).supervised(max_restarts=2)
    assert sites.attempts == [ALL] * 3
    assert sites.said == [f"it failed; starting again (restart {n} of 2)" for n in (1, 2)]


def test_one_failure_too_many_is_raised():
    sites = Sites(failure(1), failure(1))
    with pytest.raises(SiteError, match="it failed"):
        sites.supervised(max_restarts=1)
    assert sites.attempts == [ALL] * 2


def test_a_mistake_is_not_tried_again():
    sites = Sites(RecipeError("--lr is odd"), True)
    with pytest.raises(RecipeError):
        sites.supervised(max_restarts=5, min_sites=1)
    assert sites.attempts == [ALL]


def test_a_lost_site_is_left_out_and_taken_back():
    sites = Sites(failure(1), False, True).supervised(min_sites=2)
    assert sites.attempts == [ALL, ((0, 2), 1), ALL]
    assert sites.said == [
        "it failed; going on without site 1",
        "taking back site 1 at this checkpoint",
    ]


def test_a_site_that_is_lost_again_and_again_is_taken_back_ever_later():
    ends = [failure(1), False, failure(1), False, failure(1), False, True]
    sites = Sites(*ends).supervised(min_sites=2)
    assert [pause for _, pause in sites.attempts] == [None, 1, None, 2, None, 4, None]


def test_too_few_sites_start_all_again():
    sites = Sites(failure(1), failure(2), True).supervised(min_sites=2, max_restarts=1)
    assert sites.attempts == [ALL, ((0, 2), 1), ALL]


def test_a_failure_that_lost_nobody_leaves_nobody_out():
    with pytest.raises(SiteError):
        Sites(failure()).supervised(min_sites=1)


@pytest.mark.parametrize("min_sites", [0, 4])
def test_impossible_numbers_are_refused(min_sites):
    with pytest.raises(RecipeError, match="--min-sites must be from 1 to the 3 sites"):
        Restarts(min_sites=min_sites).check(3)
