"""What sites of a run have written on the hub's board: slots, by their keys."""

from __future__ import annotations

from outergrad.star.frames import Frame, Kind, MalformedError

MOST_BYTES = 1 << 30
"""Of all slots of a run."""
_SLOT_BYTES = 1 << 8
"""What a slot costs besides its content."""
_SEPARATOR = b"\n"


def asked(key: str, content: bytes = b"") -> bytes:
    """The payload of a frame that asks something of a slot."""
    return key.encode() + _SEPARATOR + content


class Slots:
    """Of one run. Whoever calls its methods holds the lock of the hub."""

    def __init__(self) -> None:
        self._contents: dict[bytes, bytes] = {}
        self._nbytes = 0

    def write(self, key: str, text: str) -> None:
        """Writes what the hub has to say."""
        self._written(key.encode(), text.encode())

    def answer(self, frame: Frame) -> bytes:
        """Does what a frame asks for.

        Returns:
            What stands in the slot then; nothing, if nothing does, or there is no more room.

        Raises:
            MalformedError: it asks for nothing.
        """
        key, separator, content = bytes(frame.payload).partition(_SEPARATOR)
        if not separator or bool(content) == (frame.kind == Kind.GET):
            raise MalformedError("a question that names no slot, or nothing to write into it")
        if frame.kind == Kind.PUT or (frame.kind == Kind.FIRST and key not in self._contents):
            return self._written(key, content)
        return self._contents.get(key, b"")

    def _written(self, key: bytes, content: bytes) -> bytes:
        before = len(self._contents[key]) if key in self._contents else -len(key) - _SLOT_BYTES
        nbytes = self._nbytes + len(content) - before
        if nbytes > MOST_BYTES:
            return b""
        self._nbytes, self._contents[key] = nbytes, content
        return content
