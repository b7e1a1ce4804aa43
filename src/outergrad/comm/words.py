"""An exchange of a few integers between all sites."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.transport import Comm


def words_of_all(comm: Comm, words: Sequence[int], lane: int = 0) -> list[list[int]]:
    """Gathers as many int64 words from every site as from this one, in rank order."""
    sizes = [len(words)] * comm.world_size
    return [t.tolist() for t in comm.all_gather(comm.control(words), sizes, lane=lane).wait()]
