"""TCP connections through NVFLARE's network: numbered messages between the cells of two processes.

NVFLARE hands messages to a pool of threads, so that they may arrive out of order.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.message import Message

CHANNEL = "outergrad"
OPEN, BYTES = "open", "bytes"
_CONNECTION, _NUMBER = "outergrad.connection", "outergrad.number"
_CHUNK_BYTES, _SHORT_BYTES, _MOMENT_S = 1 << 18, 1 << 14, 5e-4
"""Few, long messages: in NVFLARE each one costs more than its bytes do (docs/nvflare.md)."""
_MOST_EARLY = 1 << 10
"""Most pieces that wait for a missing one; with more, the connection is closed."""


class Tunnels:
    """Connections of a process that go through its NVFLARE cell.

    Args:
        cell: NVFLARE's cell of the process.
    """

    def __init__(self, cell: Any) -> None:
        self.cell = getattr(cell, "core_cell", cell)  # not the stream layer around it, which waits
        self._ends: dict[tuple[str, str], _End] = {}
        self.cell.register_request_cb(CHANNEL, BYTES, self._take)

    def carry(self, name: str, peer: str, connection: socket.socket) -> None:
        """Sends a peer what is read from a socket, and writes to the socket what the peer sends.

        Args:
            name: name of the connection, the same on both sides.
            peer: full name of the peer's cell.
            connection: socket, which is closed when the other side closes its own.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(number: int, payload: bytes) -> bool:
            message = Message({_CONNECTION: name, _NUMBER: number}, payload)
            try:
                sent = self.cell.fire_and_forget(CHANNEL, BYTES, peer, message, optional=True)
            except RuntimeError:  # the cell has ended
                return False
            return not sent[peer]

        end = _End(connection, send, lambda: self._ends.pop((peer, name), None))
        self._ends[peer, name] = end
        end.start()

    def ask(self, peer: str, topic: str, name: str = "", timeout_s: float = 10.0) -> bytes:
        """Asks a peer, and returns its answer.

        Raises:
            OSError: there is no answer, or a refusal.
        """
        message = Message({_CONNECTION: name})
        answer = self.cell.send_request(CHANNEL, topic, peer, message, timeout=timeout_s)
        code = answer.get_header(MessageHeaderKey.RETURN_CODE)
        if code != ReturnCode.OK:
            told = answer.get_header(MessageHeaderKey.ERROR) or code
            raise OSError(f"NVFLARE's server did not answer {topic!r}: {told}")
        return bytes(answer.payload or b"")

    def close(self) -> None:
        """Closes all connections."""
        for end in list(self._ends.values()):
            end.close()

    def _take(self, message: Message) -> None:
        key = message.get_header(MessageHeaderKey.ORIGIN), message.get_header(_CONNECTION)
        end = self._ends.get(key)
        if end is not None:
            end.take(message.get_header(_NUMBER), bytes(message.payload or b""))


def name_in(message: Message) -> str:
    """Returns the name of the connection that a message is about."""
    return str(message.get_header(_CONNECTION))


class _End:
    """One side of a connection.

    Args:
        connection: the socket.
        send: sends a numbered piece to the other side, an empty one at the end; returns whether it
            was sent.
        ended: called when no more pieces can arrive.
    """

    def __init__(
        self,
        connection: socket.socket,
        send: Callable[[int, bytes], bool],
        ended: Callable[[], object],
    ) -> None:
        self._connection, self._send, self._ended = connection, send, ended
        self._lock, self._next = threading.Lock(), 0
        self._early: dict[int, bytes] = {}
        self._ordered = SimpleQueue[bytes]()
        self._threads = [
            threading.Thread(target=run, name="outergrad tunnel", daemon=True)
            for run in (self._read, self._write)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def take(self, number: int, payload: bytes) -> None:
        """Queues a piece that arrived, once all pieces before it are there."""
        with self._lock:
            if len(self._early) == _MOST_EARLY:
                self.close()
                return
            self._early[number] = payload
            while self._next in self._early:
                self._ordered.put(self._early.pop(self._next))
                self._next += 1

    def close(self) -> None:
        with suppress(OSError):  # it is closed already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._ordered.put(b"")

    def _read(self) -> None:
        number, payload = 0, b"-"
        while payload:
            payload = self._piece()
            if not self._send(number, payload):
                break
            number += 1
        self.close()

    def _piece(self) -> bytes:
        """Reads what is there; a long piece also takes in bytes that come within a moment."""
        recv, piece = self._connection.recv, bytearray()
        with suppress(OSError):  # there is no more, or no connection
            piece += recv(_CHUNK_BYTES)
            while _SHORT_BYTES < len(piece) < _CHUNK_BYTES:
                time.sleep(_MOMENT_S)
                rest = recv(_CHUNK_BYTES - len(piece), socket.MSG_DONTWAIT)
                if not rest:
                    break
                piece += rest
        return bytes(piece)

    def _write(self) -> None:
        with suppress(OSError):
            while payload := self._ordered.get():
                self._connection.sendall(payload)
        self._ended()
        self.close()
        self._threads[0].join()
        self._connection.close()
