"""Whether all parameters of the next message are ready."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator


class Readiness:
    """Which parameters a backward has still to come to; it looks at each of a message once.

    Args:
        waiting: all that it will come to.
    """

    def __init__(self, waiting: Iterable[str]) -> None:
        self._waiting = set(waiting)
        self._names: Collection[str] = ()
        self._rest: Iterator[str] = iter(())
        self._next: str | None = None

    def note(self, name: str) -> None:
        """The backward has nothing more for a parameter."""
        self._waiting.discard(name)

    def are_ready(self, names: Collection[str]) -> bool:
        """Whether none of them is waited for.

        Args:
            names: of one message, the same object until they are ready.
        """
        if names is not self._names:
            self._names, self._rest = names, iter(names)
            self._next = next(self._rest, None)
        while self._next is not None and self._next not in self._waiting:
            self._next = next(self._rest, None)
        return self._next is None
