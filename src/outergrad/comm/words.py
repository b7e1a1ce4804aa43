"""A few numbers of every site, for every site."""

from __future__ import annotations

from collections.abc import Sequence

from outergrad.core.transport import Comm


def words_of_all(comm: Comm, words: Sequence[int], lane: int = 0) -> list[list[int]]:
    """What every site says, in the order of sites: as many int64 words as this one."""
    sizes = [len(words)] * comm.world_size
    return [t.tolist() for t in comm.all_gather(comm.control(words), sizes, lane=lane).wait()]
