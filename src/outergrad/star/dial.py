"""A site's connection to the hub by gRPC with mutual TLS, which dials again after a break."""

from __future__ import annotations

import threading
import time
import weakref

import grpc

from outergrad._printable import printable
from outergrad.star.authority import Kit
from outergrad.star.frames import Stream
from outergrad.star.line import Line
from outergrad.star.line_watch import LineWatch
from outergrad.star.server import KEEPALIVE, METHOD, SERVICE

_AGAIN_S, _LONGEST_PAUSE_S = 0.02, 0.5
_FLUSH_S = 2.0
"""Seconds in which nothing moves that a process which ends waits until the hub has what it sent."""
_DIAL_MS = 5000
"""Longest time of one attempt: after it a cable that is back is tried anew."""
_OPTIONS = (
    *KEEPALIVE,
    ("grpc.min_reconnect_backoff_ms", _DIAL_MS),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
_FINAL = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED}
"""Status codes after which it would be no use to dial again."""


class Dialler:
    """Keeps a line connected, from a thread of its own.

    Args:
        line: of this process.
        address: host and port of the hub.
        kit: of the site.
        patience_s: seconds that the hub may be out of reach.
    """

    def __init__(self, line: Line, address: str, kit: Kit, patience_s: float) -> None:
        self._line, self._address, self._patience_s = line, address, patience_s
        key, certificate = kit.key.encode(), kit.certificate.encode()
        self._credentials = grpc.ssl_channel_credentials(kit.authority.encode(), key, certificate)
        self._call: grpc.Call | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="star line", daemon=True)
        self._watch = LineWatch(line, address, kit, patience_s)
        self._thread.start()
        _DIALLERS.add(self)

    def _run(self) -> None:
        heard_at, pause_s = time.monotonic(), _AGAIN_S
        while not (self._is_done() or self._line.has_failed):
            began = time.monotonic()
            was_welcome, error = self._stream()
            if was_welcome:
                heard_at, pause_s = time.monotonic(), _AGAIN_S
            why = f"the hub at {self._address}: {_details(error)}"
            if _is_final(error):
                self._line.fail(why)
                return
            if time.monotonic() - max(heard_at, began if was_welcome else 0) > self._patience_s:
                self._line.fail(f"{why}, for {self._patience_s:g} s")
                return
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _stream(self) -> tuple[bool, Exception | None]:
        """Runs one stream to its end; returns whether the hub answered, and the final error."""
        stream, error = Stream(), None
        try:
            with grpc.secure_channel(self._address, self._credentials, _OPTIONS) as channel:
                call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(self._line.messages(stream))
                self._call = call
                for message in call:
                    self._line.take(stream, message)
        except Exception as raised:  # of any kind: threads must not wait for this one in vain
            error = raised
        finally:
            self._line.break_off(stream)
        return stream.is_welcome, error

    def _is_done(self) -> bool:
        return self._ended.is_set() and (self._line.is_flushed or not self._line.is_ready)

    def end(self) -> None:
        """Leaves once the hub has all that was sent, and does not wait for that."""
        self._line.leave()
        self._ended.set()
        threading.Thread(target=self._hang_up, name="star end", daemon=True).start()

    def _hang_up(self) -> None:
        self._line.flush(_FLUSH_S)
        self._watch.end()
        self._line.fail("this site has left")
        if self._call is not None:
            self._call.cancel()

    def finish(self) -> None:
        """Leaves, and waits briefly until the hub has all that was sent."""
        self._line.leave()
        self._ended.set()
        self._hang_up()
        self._thread.join(_FLUSH_S)


_DIALLERS: weakref.WeakSet[Dialler] = weakref.WeakSet()


def finish_all() -> None:
    """Leaves on all lines: what was sent has to arrive before the process ends."""
    for dialler in list(_DIALLERS):
        dialler.finish()


def _is_final(error: Exception | None) -> bool:
    if isinstance(error, grpc.Call):
        return error.code() in _FINAL
    return error is not None


def _details(error: Exception | None) -> str:
    if error is None:
        return "it ended the stream"
    told = error.details() if isinstance(error, grpc.Call) else str(error)
    return printable(" ".join(str(told).split()))
