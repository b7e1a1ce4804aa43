"""Readiness of the parameters of the next message."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator


class Readiness:
    """Parameters that a backward has still to reach; it looks at each of a message once.

    Args:
        waiting: all parameters that the backward will reach.
    """

    def __init__(self, waiting: Iterable[str]) -> None:
        self._waiting = set(waiting)
        self._names: Collection[str] = ()
        self._rest: Iterator[str] = iter(())
        self._next: str | None = None

    def note(self, name: str) -> None:
        """Records that the backward has nothing more for a parameter."""
        self._waiting.discard(name)

    def are_ready(self, names: Collection[str]) -> bool:
        """True if the backward has nothing more for any of these parameters.

        Args:
            names: parameters of one message, the same object until they are ready.
        """
        if names is not self._names:
            self._names, self._rest = names, iter(names)
            self._next = next(self._rest, None)
        while self._next is not None and self._next not in self._waiting:
            self._next = next(self._rest, None)
        return self._next is None
