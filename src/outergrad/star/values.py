"""The store of a run: values by key that sites set, add to and wait for, as in `dist.Store`."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from outergrad.star.frames import Frame, MalformedError

_LENGTH = struct.Struct("!I")
_KEY_BYTES = 1 << 8
"""Bytes that a key costs besides its value."""
_MOST_WAITING = 32
"""Most questions of one site that wait for keys; each of its threads waits for one."""
_LONGEST_NUMBER = 20
MOST_VALUE = 1 << 19
"""Most bytes of a value: an answer has to fit into a frame."""


class Ask(IntEnum):
    """The questions to the store, with their arguments."""

    SET = 1
    """Key, value."""
    ADD = 2
    """Key, number to add: answers the sum."""
    COMPARE_SET = 3
    """Key, expected value, desired value: answers the value that the key then has."""
    APPEND = 4
    """Key, value to add at the end."""
    DELETE = 5
    """Key: answers 1 if it was there."""
    CHECK = 6
    """Keys: answers 1 if all are there."""
    COUNT = 7
    """No arguments: answers the number of keys."""
    GET = 8
    """Milliseconds to wait, keys: answers the values, packed, once all are there."""


def packed(parts: Sequence[bytes]) -> bytes:
    """Returns parts of any length as one content."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpacked(content: bytes) -> list[bytes]:
    """Returns the parts that `packed` put together.

    Raises:
        MalformedError: the content is not of this form.
    """
    parts, at = [], 0
    while at < len(content):
        if at + _LENGTH.size > len(content):
            raise MalformedError("a question to the store that ends too early")
        (length,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + length
        if at > len(content):
            raise MalformedError("a question to the store that ends too early")
        parts.append(content[at - length : at])
    return parts


@dataclass(frozen=True)
class _Waiting:
    """A question that is answered once all its keys are there."""

    asker: int
    number: int
    keys: Sequence[bytes]
    until: float


Answer = tuple[int, int, bytes]
"""Rank of the site that asked, number of its question, and the answer."""


class Values:
    """The store of one run; callers hold the lock of the hub.

    Args:
        clock: returns the time, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[bytes, bytes] = {}
        self._writers: dict[bytes, int] = {}
        self._nbytes: Counter[int] = Counter()
        self._waiting: list[_Waiting] = []

    def answers(self, frame: Frame, asker: int, share: int) -> list[Answer]:
        """Returns the answers that a question makes possible: its own, and those that waited.

        Args:
            frame: the question.
            asker: rank of the site that asks.
            share: most bytes that one site may have written.

        Raises:
            MalformedError: no site asks this, or the site writes more than its share.
        """
        payload = bytes(frame.payload)
        try:
            ask, parts = Ask(payload[0]), unpacked(payload[1:])
            if ask == Ask.GET:
                return self._get(frame.number, asker, *parts)
            answer = _ANSWERS[ask](self, asker, *parts)
        except (IndexError, ValueError, TypeError) as error:
            if isinstance(error, MalformedError):
                raise
            raise MalformedError("a question to the store that cannot be read") from None
        if self._nbytes[asker] > share:
            raise MalformedError(f"more than its share of the store, which is {share} bytes")
        return [(asker, frame.number, answer), *self._due()]

    def _get(self, number: int, asker: int, wait_ms: bytes, *keys: bytes) -> list[Answer]:
        now = self._clock()
        self._waiting = [one for one in self._waiting if one.until > now]
        if sum(one.asker == asker for one in self._waiting) >= _MOST_WAITING:
            raise MalformedError("more questions to the store than anybody has")
        self._waiting.append(_Waiting(asker, number, keys, now + int(wait_ms) / 1000))
        return self._due()

    def _due(self) -> list[Answer]:
        """Takes the questions for which all keys are there; returns their answers."""
        due = [one for one in self._waiting if all(key in self._values for key in one.keys)]
        if due:
            self._waiting = [one for one in self._waiting if one not in due]
        return [
            (one.asker, one.number, packed([self._values[key] for key in one.keys])) for one in due
        ]

    def _write(self, writer: int, key: bytes, value: bytes) -> bytes:
        if len(key) + len(value) > MOST_VALUE:
            raise ValueError
        self._drop(key)
        self._values[key], self._writers[key] = value, writer
        self._nbytes[writer] += len(key) + len(value) + _KEY_BYTES
        return value

    def _drop(self, key: bytes) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._nbytes[self._writers.pop(key)] -= len(key) + len(value) + _KEY_BYTES
        return True

    def _set(self, asker: int, key: bytes, value: bytes) -> bytes:
        self._write(asker, key, value)
        return b""

    def _add(self, asker: int, key: bytes, amount: bytes) -> bytes:
        numbers = self._values.get(key, b"0"), amount
        if max(map(len, numbers)) > _LONGEST_NUMBER:
            raise ValueError
        return self._write(asker, key, str(sum(map(int, numbers))).encode())

    def _compare_set(self, asker: int, key: bytes, expected: bytes, desired: bytes) -> bytes:
        now = self._values.get(key)
        if now == expected or (now is None and not expected):
            return self._write(asker, key, desired)
        return expected if now is None else now

    def _append(self, asker: int, key: bytes, more: bytes) -> bytes:
        self._write(asker, key, self._values.get(key, b"") + more)
        return b""

    def _delete(self, _: int, key: bytes) -> bytes:
        return b"1" if self._drop(key) else b"0"

    def _check(self, _: int, *keys: bytes) -> bytes:
        return b"1" if all(key in self._values for key in keys) else b"0"

    def _count(self, _: int) -> bytes:
        return str(len(self._values)).encode()


_ANSWERS: dict[Ask, Callable[..., bytes]] = {
    Ask.SET: Values._set,
    Ask.ADD: Values._add,
    Ask.COMPARE_SET: Values._compare_set,
    Ask.APPEND: Values._append,
    Ask.DELETE: Values._delete,
    Ask.CHECK: Values._check,
    Ask.COUNT: Values._count,
}
