"""The hub's log, whose lines are signed and hold the digest of the line before."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from outergrad.star.authority import Identity, read_certificate
from outergrad.star.run import Told

fcntl: Any = None
with suppress(ImportError):  # there are systems that cannot lock so
    import fcntl

_FIRST = "0" * 64
_WAY = ec.ECDSA(hashes.SHA256())
_BLOCK, _CLOSED = 1 << 16, -1


class TamperedError(ValueError):
    """A log is not what the hub has written."""


class Journal:
    """Appends lines to a log, to which other processes may append as well.

    A line is written as a whole or not at all. If it cannot be written, as on a full disk, its
    beginning is cut off, and `failure` says why until a line can be written again: this line then
    says how many are missing. Half a line at the end, of a hub that was killed or a machine that
    lost power, is cut off too, and a line says so.

    Args:
        path: of the file.
        identity: the identity that signs.

    Raises:
        OSError: the file cannot be opened, or half a line at its end cannot be cut off.
        TamperedError: its last line cannot be read.

    Attributes:
        failure: why the last line could not be written; empty if it was.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._path, self._key, self._lock = path, identity.private_key, threading.Lock()
        self.failure = ""
        self._missing, self._since, self._cut = 0, 0.0, b""
        self._end, self._index, self._before = -1, 0, _FIRST
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with self._lock, _alone(self._file):
                self._find_place()
                if self._cut:
                    self._try(lambda: None)
        except BaseException:
            os.close(self._file)
            raise

    def write(self, what: str, **facts: Any) -> None:
        """Appends a line about an event and its facts, or counts it as missing if it cannot."""
        with self._lock, _alone(self._file):
            if not self._try(lambda: self._append(what, facts)):
                self._missing += 1

    def try_again(self) -> bool:
        """True if lines can be written; tries again if the last one could not."""
        with self._lock, _alone(self._file):
            return not self.failure or self._try(lambda: None)

    def _try(self, write: Callable[[], None]) -> bool:
        """Writes, after lines about cut or missing ones; returns whether that was possible."""
        try:
            self._find_place()
            if self._cut:
                digest = hashlib.sha256(self._cut).hexdigest()
                self._append("recovered", {"cut_bytes": len(self._cut), "sha256": digest})
                self._cut = b""
            if self.failure:
                about = {"lines": self._missing, "since": self._since, "why": self.failure}
                self._append("incomplete", about)
                self._missing, self.failure = 0, ""
            write()
        except (OSError, TamperedError) as error:
            if not self.failure:
                self._since = round(time.time(), 3)
            self.failure = _why(error)
            return False
        return True

    def _find_place(self) -> None:
        """Finds the place of the next line, unless the file is as long as this process left it."""
        size = os.fstat(self._file).st_size
        if size == self._end:
            return
        last, cut = _last_line(self._file, size)
        self._index, self._before = (0, _FIRST) if last is None else _place_behind(last)
        if cut:
            os.ftruncate(self._file, size - len(cut))
        self._end, self._cut = size - len(cut), self._cut + cut

    def _append(self, what: str, facts: dict[str, Any]) -> None:
        told = {"index": self._index, "time": round(time.time(), 3), "what": what, **facts}
        line = _signed({**told, "before": self._before}, self._key)
        whole = line.encode() + b"\n"
        try:
            written = os.write(self._file, whole)
            while written < len(whole):
                written += os.write(self._file, whole[written:])
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(whole)
        self._index, self._before = self._index + 1, _digest(line)

    def close(self) -> None:
        """Closes the file; lines that are written later are lost."""
        with self._lock:
            file, self._file = self._file, _CLOSED
            if file != _CLOSED:
                os.close(file)


@contextmanager
def _alone(file: int) -> Iterator[None]:
    """Locks a file against other processes, where the system can."""
    with suppress(OSError, AttributeError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with suppress(OSError, AttributeError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _why(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    return str(error) if number is None else os.strerror(number)


def note(path: Path, identity: Identity, what: str, **facts: Any) -> None:
    """Appends one line, from a process that is not the hub's.

    Args:
        path: of the log.
        identity: of the hub.
        what: name of the event.
        **facts: facts of the event.

    Raises:
        OSError: the log cannot be written.
        TamperedError: the last line of the log cannot be read.
    """
    journal = Journal(path, identity)
    try:
        journal.write(what, **facts)
        if journal.failure:
            raise OSError(f"{path}: cannot be written: {journal.failure}")
    finally:
        journal.close()


def verified(path: Path, certificate: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of a log, each after it was checked.

    The log alone does not show that lines were cut off at its end: compare the digest of the last
    line, or its index, with one that was noted elsewhere.

    Args:
        path: of the file.
        certificate: of the hub, PEM.

    Raises:
        TamperedError: a line was changed, left out, put in or moved.
    """
    key = read_certificate(certificate).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    before = _FIRST
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for index, line in enumerate(file):
            if not line.endswith("\n"):
                raise TamperedError(
                    f"line {index + 1} of the log is not whole, as of a hub that was killed: when "
                    f"the hub starts again, it cuts off what is there, and says so in a line"
                )
            told = _checked(line.rstrip("\n"), index, before, key)
            before = _digest(line.rstrip("\n"))
            yield told


def _signed(told: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> str:
    text = json.dumps(told)
    signature = base64.b64encode(key.sign(text.encode(), _WAY)).decode()
    return json.dumps({"line": text, "signature": signature})


def _checked(line: str, index: int, before: str, key: ec.EllipticCurvePublicKey) -> dict[str, Any]:
    where = f"line {index + 1} of the log"
    try:
        outer = json.loads(line)
        text = outer["line"]
        key.verify(base64.b64decode(outer["signature"]), text.encode(), _WAY)
        told = json.loads(text)
        found = told["index"], told["before"]
    except (ValueError, TypeError, KeyError):
        raise TamperedError(f"{where} cannot be read") from None
    except InvalidSignature:
        raise TamperedError(f"{where} was not signed by this hub") from None
    if found != (index, before):
        raise TamperedError(f"{where} does not follow on the one before")
    return told


def _place_behind(line: str) -> tuple[int, str]:
    try:
        return json.loads(json.loads(line)["line"])["index"] + 1, _digest(line)
    except (ValueError, TypeError, KeyError):
        raise TamperedError("the last line of the log cannot be read: move the log away") from None


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()


def _last_line(file: int, size: int) -> tuple[str | None, bytes]:
    """Returns the last line that ends in a newline, and the bytes behind it."""
    end, found = size, b""
    while end and found.count(b"\n") < 2:
        begin = max(0, end - _BLOCK)
        found = os.pread(file, end - begin, begin) + found
        end = begin
    lines = found.split(b"\n")
    last = lines[-2].decode(errors="replace") if len(lines) > 1 else None
    return last, lines[-1]


_COUNTED = frozenset({"refused", "away", "back"})
"""Events that a stranger, or a site with a broken line, can cause hundreds of times a second."""
_AT_FIRST, _PERIOD_S = 5, 60.0
_MOST_KINDS = 256
_OTHERS = "others"


class Repeats:
    """A filter before a log.

    Refusals, and lines that break and come back, are counted for each site or address. The first
    few of a period are written as they happen; of the others only their number is written, with
    the facts of the last.

    Args:
        write: writes to the log.
        at_first: number of events that are written as they happen.
        period_s: seconds for which the others are counted before their number is written.
    """

    def __init__(self, write: Told, at_first: int = _AT_FIRST, period_s: float = _PERIOD_S) -> None:
        self._write, self._at_first, self._period_s = write, at_first, period_s
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def write(self, what: str, **facts: Any) -> None:
        """Writes an event with its facts, or counts it."""
        if what not in _COUNTED or self._is_early(what, facts):
            self._write(what, **facts)

    def _is_early(self, what: str, facts: dict[str, Any]) -> bool:
        who = str(facts.get("site") or facts.get("host") or "")
        with self._lock:
            is_full = "site" not in facts and len(self._kinds) >= _MOST_KINDS
            key = what, _OTHERS if is_full and (what, who) not in self._kinds else who
            kind = self._kinds.setdefault(key, _Kind(time.monotonic()))
            kind.count += 1
            kind.last = facts
            return kind.count <= self._at_first

    def flush(self, everything: bool = False) -> None:
        """Writes the counts whose period is over, or `everything`; to be called now and then."""
        now = time.monotonic()
        with self._lock:
            over = [
                key
                for key, kind in self._kinds.items()
                if everything or now - kind.began_at > self._period_s
            ]
            ended = [(key, self._kinds.pop(key)) for key in over]
        for (what, who), kind in ended:
            more = kind.count - self._at_first
            if more > 0:
                about = {"site": _OTHERS, **kind.last} if who == _OTHERS else kind.last
                self._write(what, **about, times=more, within_s=round(now - kind.began_at, 1))


class _Kind:
    """The count of one event of one site or address, since a moment."""

    def __init__(self, began_at: float) -> None:
        self.began_at, self.count = began_at, 0
        self.last: dict[str, Any] = {}
