"""A session that says what it sends is believed, and no other."""

from __future__ import annotations

import pytest
from made_up import link, timing

from outergrad_lab.bench.check import MESSAGES_BYTES, check

CLAIMED = 1_000_000
CASES = [
    # sites, counted, holds
    (2, CLAIMED, True),
    (2, 1.03 * CLAIMED + MESSAGES_BYTES, True),
    (2, 1.03 * CLAIMED + MESSAGES_BYTES + 1, False),
    (2, 0.97 * CLAIMED - MESSAGES_BYTES, True),
    (2, 0.97 * CLAIMED - MESSAGES_BYTES - 1, False),
    (8, 1.03 * CLAIMED + 7 * MESSAGES_BYTES, True),
    (8, 1.03 * CLAIMED + 7 * MESSAGES_BYTES + 1, False),
    (2, 0, False),
    (2, 2 * CLAIMED, False),
]


@pytest.mark.parametrize(("sites", "counted", "holds"), CASES)
def test_counts_agree_within_3_percent_and_a_kilobyte_per_other_site(sites, counted, holds):
    measured = timing("dad", claimed_bytes=CLAIMED, payload_bytes=counted)
    (one,) = check(link(timings=[measured]), sites)
    assert one.holds is holds
    text = str(one)
    assert text.startswith("100mbit, dad: session.stats() says 1,000,000 bytes per step, which ")
    assert ("DIFFERS" not in text) is holds
    assert "\n" not in text


def test_methods_without_a_session_claim_nothing():
    measured = [timing("ddp"), timing("dad", claimed_bytes=5.0), timing("alone")]
    assert [one.method for one in check(link(timings=measured), 2)] == ["dad"]
