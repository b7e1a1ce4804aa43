"""The store of a process group at the hub, in place of a TCPStore: no open port."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from outergrad.star.frames import Kind
from outergrad.star.transport import Held
from outergrad.star.values import MOST_VALUE, Ask, packed, unpacked

_ANSWERS_S = 5.0
"""Seconds that the hub has for an answer, beyond those that a question waits for a key."""
IN_SESSIONS = (
    "torch.distributed has no group here: its sites have gone on with others, or this one comes to "
    "others that train (when_lost='go on'). Sessions of og.distribute go on"
)


class HubStore(Store):
    """Values by key at the hub, for all sites of a run, as PyTorch's stores have them.

    Args:
        held: this process's hold of the line.
        timeout: of questions that wait for a key.

    Attributes:
        held: this process's hold of the line.
    """

    def __init__(self, held: Held, timeout: timedelta) -> None:
        super().__init__()
        self.held, self._line, self._timeout = held, held.line, timeout

    @property
    def timeout(self) -> timedelta:
        """Time limit of questions that wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time limit of questions that wait for a key."""
        self._timeout = timeout

    def clone(self) -> HubStore:
        """Returns a store of its own on the same line, whose time limit may differ."""
        return HubStore(self.held, self._timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value."""
        self._ask(Ask.SET, key, value)

    def get(self, key: str) -> bytes:
        """Returns a value, once there is one.

        Raises:
            dist.DistStoreError: there is none within the time limit.
        """
        return self._values([key], self._timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns values, once there are all of them."""
        return [self.get(key) for key in keys]  # one by one: an answer is one frame

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Writes values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Adds to the number that a key has, 0 at first; returns the sum."""
        return int(self._ask(Ask.ADD, key, str(value)))

    def append(self, key: str, value: str | bytes) -> None:
        """Adds a value at the end of the one that a key has."""
        self._ask(Ask.APPEND, key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Writes a value where the key has the expected one; returns the one that it then has."""
        return self._ask(Ask.COMPARE_SET, key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys have values."""
        return self._ask(Ask.CHECK, *keys) == b"1"

    def delete_key(self, key: str) -> bool:
        """Deletes a key; returns whether it had a value."""
        return self._ask(Ask.DELETE, key) == b"1"

    def num_keys(self) -> int:
        """Returns the number of keys that have a value."""
        return int(self._ask(Ask.COUNT))

    # PyTorch's C++ code calls two of them by other names.
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` are there."""
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys have values.

        Raises:
            dist.DistStoreError: they have none within the time limit.
        """
        for key in keys:
            self._values([key], timeout or self._timeout)

    def _values(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        wait_ms = int(timeout.total_seconds() * 1000)
        limit_s = wait_ms / 1000
        answer = self._answer(_question(Ask.GET, str(wait_ms), *keys), limit_s)
        if answer is None:
            why = f"no site set {', '.join(keys)}"
            raise dist.DistStoreError(self._line.why_unanswered(limit_s, why))
        return unpacked(answer)

    def _ask(self, ask: Ask, *arguments: str | bytes) -> bytes:
        question = _question(ask, *arguments)
        if len(question) > MOST_VALUE:
            told = f"{len(question)} bytes for the store of the hub, which takes {MOST_VALUE}"
            raise ValueError(f"{told}: send them by a collective instead")
        answer = self._answer(question, _ANSWERS_S)
        if answer is None:
            raise dist.DistStoreError(self._line.why_unanswered(_ANSWERS_S))
        return answer

    def _answer(self, question: bytes, limit_s: float) -> bytes | None:
        if self._line.has_left or not self._line.is_ready:
            raise dist.DistStoreError(IN_SESSIONS)
        return self._line.ask(Kind.STORE, question, limit_s)


def _question(ask: Ask, *arguments: str | bytes) -> bytes:
    parts = (one.encode() if isinstance(one, str) else bytes(one) for one in arguments)
    return bytes([ask]) + packed(list(parts))
