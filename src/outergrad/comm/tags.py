"""Tags of messages on a process group: gloo matches messages by sender and tag, in order."""

from __future__ import annotations

_TAG = 0x6F67
"""First tag without a turn, apart from the user's point-to-point messages on the same group."""
CLOSING_TAG = _TAG - 1
"""Tag of a receive that is never answered (`TorchComm.close`)."""
_FIRST_TURN_TAG, _LANES = 1 << 30, 8
"""First tag of messages with a turn; each turn has one tag per lane."""
SUMS_LANE = 6
"""Lane of sums that two sites send each other whole."""


def tag_of(turn: int, lane: int) -> int:
    """Returns the tag of a turn's messages in a lane, which no other turn or lane has."""
    assert 0 <= lane < _LANES
    return _FIRST_TURN_TAG + _LANES * turn + lane if turn else _TAG + lane
