"""Tags of messages on a process group: those of gloo are matched by sender and tag, in order."""

from __future__ import annotations

_TAG = 0x6F67
"""Keeps messages apart from point-to-point messages of the user's on the same group."""
CLOSING_TAG = _TAG - 1
"""Of a receive that is never answered."""
_FIRST_TURN_TAG, _LANES = 1 << 30, 8
"""Tags of turns begin there; each turn has one for every lane."""
SUMS_LANE = 6
"""Of what two sites add up."""


def tag_of(turn: int, lane: int) -> int:
    """The tag of messages; no other turn or lane has the same."""
    assert 0 <= lane < _LANES
    return _FIRST_TURN_TAG + _LANES * turn + lane if turn else _TAG + lane
