"""The hub's log: what happened, in lines each of which is signed and names the one before."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from outergrad.star.authority import Identity, read_certificate

_FIRST = "0" * 64
_WAY = ec.ECDSA(hashes.SHA256())


class TamperedError(ValueError):
    """A log is not what the hub has written."""


class Journal:
    """Appends to a log, behind what is there.

    Args:
        path: of the file.
        identity: whose key signs.

    Raises:
        TamperedError: its last line is none.
    """

    def __init__(self, path: Path, identity: Identity) -> None:
        self._key, self._lock = identity.private_key, threading.Lock()
        last = _last_line(path)
        self._index, self._before = (0, _FIRST) if last is None else _place_behind(last)
        self._file = path.open("a", encoding="utf-8")

    def write(self, what: str, **facts: Any) -> None:
        """Appends a line.

        Args:
            what: happened.
            **facts: of it.
        """
        with self._lock:
            told = {"index": self._index, "time": round(time.time(), 3), "what": what, **facts}
            line = _signed({**told, "before": self._before}, self._key)
            self._file.write(line + "\n")
            self._file.flush()
            self._index, self._before = self._index + 1, _digest(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def verified(path: Path, certificate: str) -> Iterator[dict[str, Any]]:
    """The lines of a log, each after it was checked.

    What was cut off at the end cannot be seen in the log alone: compare the digest of the last
    line, or its index, with what was noted elsewhere.

    Args:
        path: of the file.
        certificate: of the hub, PEM.

    Raises:
        TamperedError: a line was changed, left out, put in or moved.
    """
    key = read_certificate(certificate).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    before = _FIRST
    with path.open(encoding="utf-8") as file:
        for index, line in enumerate(file):
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


def _last_line(path: Path) -> str | None:
    if not path.exists():
        return None
    last = None
    with path.open(encoding="utf-8") as file:
        for line in file:
            last = line.rstrip("\n")
    return last
