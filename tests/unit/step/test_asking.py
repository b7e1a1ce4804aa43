"""What sites tell each other on a board when they settle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outergrad.step.asking import all_made, tell_made

SESSION, OTHERS_DIGEST = 7, 5


class Board:
    """The other site leaves its word, and ends, while this one looks for the n-th time."""

    def __init__(self, looks: int) -> None:
        self.told: dict[str, bytes] = {}
        self.is_over, self._looks = False, looks

    def put(self, key: str, content: bytes) -> None:
        self.told[key] = content

    def _look(self) -> None:
        self._looks -= 1
        if self._looks == 0:
            tell_made(self, 1, 3, {SESSION: OTHERS_DIGEST})  # type: ignore[arg-type]
            self.is_over = True

    def get(self, key: str) -> bytes | None:
        found = self.told.get(key)
        self._look()
        return found

    def is_done(self, _: int) -> bool:
        found = self.is_over
        self._look()
        return found

    def slot(self, _: str) -> None:
        return None


@pytest.mark.parametrize("looks", [1, 2, 3, 4])
def test_what_came_to_a_site_is_known_whenever_it_ends(looks):
    board: Any = Board(looks)
    comm: Any = SimpleNamespace(rank=0, world_size=2, board=board)
    pact: Any = SimpleNamespace(made=3, asked=0, digests_of=lambda _: {SESSION: 4})
    found = all_made(comm, pact, SESSION, board.is_done, limit_s=5.0)
    assert found == {0: 4, 1: OTHERS_DIGEST}
