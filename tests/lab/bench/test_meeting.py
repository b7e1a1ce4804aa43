"""Sites agree through a file."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest
from threads import at_every_site

NUMBERS = (0.0, -0.0, 0.1, 1 / 3, 1e-308, 5e-324, 1.7976931348623157e308, 2**53 + 1, math.inf)


@pytest.mark.parametrize("sites", [1, 2, 4])
def test_a_barrier_holds_until_all_are_there(tmp_path, sites):
    here = []

    def body(meeting):
        seen = []
        for turn in range(5):
            time.sleep(0.01 * ((meeting.site + turn) % sites))
            here.append(meeting.site)
            meeting.barrier()
            seen.append(len(here) >= (turn + 1) * sites)
        return seen

    assert at_every_site(tmp_path / "meeting", sites, body) == [[True] * 5] * sites


@pytest.mark.parametrize("sites", [1, 2, 4])
def test_the_first_site_answers_for_all_in_order_and_to_the_last_bit(tmp_path, sites):
    def body(meeting):
        return [meeting.told(n if meeting.site == 0 else -1.0).hex() for n in NUMBERS]

    wanted = [float(number).hex() for number in NUMBERS]
    assert at_every_site(tmp_path / "meeting", sites, body) == [wanted] * sites


def test_the_other_sites_need_no_answer_of_their_own(tmp_path):
    def body(meeting):
        return meeting.told(math.nan if meeting.site == 0 else None)

    assert all(map(math.isnan, at_every_site(tmp_path / "meeting", 3, body)))


def test_all_start_at_the_same_moment_after_the_last_has_come(tmp_path):
    def body(came_s, started_s, meeting):
        for turn in range(5):
            time.sleep(0.02 * (meeting.site == turn % 3))
            came_s[turn].append(time.monotonic())
            meeting.start()
            started_s[turn].append(time.monotonic())

    came_s, started_s = [[[] for _ in range(5)] for _ in range(2)]
    at_every_site(tmp_path / "meeting", 3, partial(body, came_s, started_s))
    assert all(min(s) >= max(c) for c, s in zip(came_s, started_s, strict=True))
    assert min(max(s) - min(s) for s in started_s) < 0.005  # a barrier alone needs twice as long
