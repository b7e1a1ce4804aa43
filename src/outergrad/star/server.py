"""The hub's gRPC server: streams with mutual TLS, and the check of who may open one."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from cryptography.x509 import Certificate

from outergrad.core.addresses import Address, read_address
from outergrad.star.authority import name_in, now, read_certificate
from outergrad.star.connections import GREETING_S, Connections, Pace, host_in, most_connections
from outergrad.star.folder import HubFolder
from outergrad.star.frames import MOST_MESSAGE_BYTES, Hello, MalformedError, unpacked
from outergrad.star.hub import GRACE_S, Hub, RefusedError
from outergrad.star.journal import Journal, Repeats
from outergrad.star.roster import Roster
from outergrad.star.run import Member, Run, Stream
from outergrad.star.sentences import sentence
from outergrad.star.window import WINDOW_BYTES


def refuse_taken(listen: Address) -> None:
    """Raises if the port cannot be used, by opening it for a moment.

    Args:
        listen: Address and port of this machine, as ``[::]:8443``; port 0 is always free.

    Raises:
        OSError: Another program has the port, or it is no address of this machine's.
    """
    try:
        _open(listen)
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)
        why = "the name is not known here" if is_name else os.strerror(error.errno or 0)
        raise OSError(f"cannot listen on {listen} ({why}): use another --listen") from None


def _open(listen: Address) -> None:
    host, both = listen.host, listen.host == "::"
    if both and not socket.has_dualstack_ipv6():  # a machine without IPv6: gRPC takes IPv4, too
        host, both = "0.0.0.0", False
    family = socket.getaddrinfo(host, listen.port)[0][0]
    with socket.create_server((host, listen.port), family=family, dualstack_ipv6=both):
        pass


SERVICE, METHOD = "outergrad.Star", "Line"
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),  # counts while gRPC's own probe holds up the keepalive
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),  # by default every 64 kB cost a delay
    ("grpc.http2.max_frame_size", 1 << 18),
)
"""Options of channels: a line is down after 3 silent seconds; pings keep it in routers' tables."""
_OF_SERVER = (
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),  # otherwise gRPC disconnects sites that ping this often
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", int(GREETING_S * 1000)),
    ("grpc.max_connection_idle_ms", int(GREETING_S * 1000)),  # without a stream
)
_WATCH_S = 0.1
_STREAMS_PER_SITE = 4
_LATER = 64
"""Sites that may be invited while the hub serves, besides those that it begins with."""
_WAITING = 16
"""Most ungreeted connections of one address, besides those that its sites may need."""


class HubServer:
    """A hub that listens on the network.

    Args:
        folder: of the hub.
        listen: address and port of this machine; port 0 chooses one.
        sites: names of the sites that take part, in rank order; None for all that were invited.
        grace_s: seconds that a site may be away before the others are told that it is lost.
        say: called with a sentence about each event, in the names of sites; must not block.

    Attributes:
        port: on which the hub listens.

    Raises:
        ValueError: a site was not invited, or there is none; or `listen` is no address.
        OSError: the folder is no hub's, its log cannot be written, or the hub cannot listen.
    """

    def __init__(
        self,
        folder: HubFolder,
        listen: str,
        sites: Sequence[str] | None = None,
        grace_s: float = GRACE_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._say = folder, say
        self._roster = Roster(folder, sites, self._speak)
        names = self.names
        address = read_address(listen, called="--listen=")
        refuse_taken(address)
        identity = folder.identity("hub")
        self._journal = Journal(folder.log_file, identity)
        self._journal.write("started", listen=str(address), sites=names)
        if self._journal.failure:
            raise OSError(f"{folder.log_file}: cannot be written: {self._journal.failure}")
        self._repeats = Repeats(self._tell)
        self._hub = Hub(names, self._repeats.write, grace_s)
        self._open = Counter[str]()
        self._certificates: weakref.WeakKeyDictionary[Member, Certificate] = (
            weakref.WeakKeyDictionary()
        )
        self._lock, self._ended = threading.Lock(), threading.Event()
        streams, most = _STREAMS_PER_SITE * len(names), most_connections()
        self._pace = Pace()
        self._ungreeted: dict[grpc.ServicerContext, float] = {}
        self._connections = Connections(self._shut, streams + _WAITING, max(most // 2, 1))
        bounds = (
            ("grpc.max_allowed_incoming_connections", most),
            ("grpc.max_concurrent_streams", _STREAMS_PER_SITE + 1),  # of a connection
        )
        workers = ThreadPoolExecutor(streams + _STREAMS_PER_SITE * _LATER + 2, "hub")
        self._server = grpc.server(workers, options=[*KEEPALIVE, *_OF_SERVER, *bounds])
        handler = grpc.stream_stream_rpc_method_handler(self._line)
        services = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        self._server.add_generic_rpc_handlers((services,))
        pair = identity.key.encode(), identity.certificate.encode()
        credentials = grpc.ssl_server_credentials(
            [pair], folder.authority_certificate.encode(), require_client_auth=True
        )
        try:
            self.port = self._server.add_secure_port(str(address), credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from None
        self._watcher = threading.Thread(target=self._watch, name="hub watch", daemon=True)

    @property
    def names(self) -> list[str]:
        """Names of the sites that a new run waits for, in rank order."""
        return self._roster.names()

    def _tell(self, what: str, **facts: Any) -> None:
        self._journal.write(what, **facts)
        self._speak(what, **facts)

    def _speak(self, what: str, **facts: Any) -> None:
        if told := sentence(what, facts):
            self._say(told)

    def start(self) -> None:
        """Begins to listen."""
        self._server.start()
        self._watcher.start()

    def wait(self) -> None:
        """Blocks until the hub is stopped."""
        self._server.wait_for_termination()

    def stop(self) -> None:
        """Ends all streams, and closes the log."""
        self._ended.set()
        self._server.stop(0).wait()
        self._watcher.join()
        self._repeats.flush(everything=True)
        self._journal.close()

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
            try:
                self._look()
            except Exception as error:  # this thread must not die: nobody else watches the lines
                self._hub.end_all(f"the hub cannot go on: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Checks log, sites and connections: without a log or a list of sites, none takes part."""
        if self._journal.failure:
            self._hub.end_all(self._no_log)
        if self._journal.try_again():
            self._hub.watch(self._why_not_any_more)
            self._hub.expect(self.names)
        self._end_ungreeted()
        self._connections.look(self.port)
        self._repeats.flush()

    def _shut(self, host: str, why: str) -> None:
        self._repeats.write("refused", host=host, why=why)

    def _end_ungreeted(self) -> None:
        """Cancels streams without a greeting, also on connections that other streams use."""
        now_s = time.monotonic()
        for context, since in list(self._ungreeted.items()):
            if now_s - since > GREETING_S:
                context.cancel()

    @contextmanager
    def _greeting(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Registers a stream while its greeting is awaited."""
        self._ungreeted[context] = time.monotonic()
        try:
            yield
        finally:
            del self._ungreeted[context]

    @property
    def _no_log(self) -> str:
        return f"the hub cannot write its log: {self._journal.failure}"

    def _line(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        peer = context.peer()
        try:
            certificate = _certificate_of(context)
            name = self._admitted(certificate)
            with _counted(self._open, name, self._lock):
                yield from self._served(certificate, requests, context)
        except (RefusedError, MalformedError) as error:
            self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, peer, str(error))

    def _served(
        self, certificate: Certificate, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        with self._greeting(context):
            first = next(requests, b"")
        self._ended.wait(self._pace.wait_s(name_in(certificate)))
        name = self._admitted(certificate)  # again: the greeting may come long after the stream
        hello = Hello.of(unpacked(first)[0])
        self._roster.note_call(name)
        self._hub.expect(self.names)
        run, member, stream = self._hub.enter(name, hello, context.peer())
        self._certificates[member] = certificate
        if not context.add_callback(lambda: self._hub.leave(run, member, stream)):
            self._hub.leave(run, member, stream)
            return
        reading = (requests, run, member, stream)
        threading.Thread(target=self._read, args=reading, name="hub reads", daemon=True).start()
        with self._connections.greeted(context.peer()):
            yield from self._hub.messages(run, member, stream)
        if stream.refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, stream.refusal)

    def _read(self, requests: Iterator[bytes], run: Run, member: Member, stream: Stream) -> None:
        try:
            for message in requests:
                self._hub.take(run, member, stream, message)
        except MalformedError as error:
            self._hub.leave(run, member, stream, f"{member.name!r} sent {error}")
        except Exception:  # raised by gRPC when the stream ends
            self._hub.leave(run, member, stream)

    def _admitted(self, certificate: Certificate) -> str:
        """Returns the site of a certificate, which TLS has checked; raises if it is refused."""
        if self._journal.failure:
            raise RefusedError(self._no_log)
        if why := self._why_not(certificate):
            raise RefusedError(f"{name_in(certificate)!r} {why}")
        return name_in(certificate)

    def _why_not(self, certificate: Certificate) -> str:
        """Returns why the owner of a certificate may not take part now; empty if it may."""
        name = name_in(certificate)
        site = self._folder.site(name)
        if site is None:
            return "was revoked" if self._folder.is_revoked(name) else "is not invited"
        if not self._roster.admits(name):
            return "is not among the sites for which this hub was started (--sites)"
        if site.serial != certificate.serial_number:
            return "came with a kit that a later one has replaced"
        # TLS checks this, too, but not on an open stream, nor when a TLS session is resumed
        if not certificate.not_valid_before_utc <= now() <= certificate.not_valid_after_utc:
            return "came with a certificate that has expired"
        return ""

    def _why_not_any_more(self, member: Member) -> str:
        """Returns why a site that took part may no longer do so; empty if it may."""
        certificate = self._certificates.get(member)
        why = "" if certificate is None else self._why_not(certificate)
        return why and f"it {why}"

    def _refuse(
        self, context: grpc.ServicerContext, code: grpc.StatusCode, peer: str, why: str
    ) -> None:
        self._repeats.write("refused", host=host_in(peer), peer=peer, why=why)
        context.abort(code, why)


def _certificate_of(context: grpc.ServicerContext) -> Certificate:
    (pem,) = context.auth_context()["x509_pem_cert"]
    return read_certificate(bytes(pem))


class _counted:  # noqa: N801  (used as a function)
    """Counts the streams of a site while one is open; refuses one too many."""

    def __init__(self, streams: Counter[str], name: str, lock: Any) -> None:
        self._streams, self._name, self._lock = streams, name, lock

    def __enter__(self) -> None:
        with self._lock:
            if self._streams[self._name] >= _STREAMS_PER_SITE:
                raise RefusedError(f"{self._name!r} has too many streams")
            self._streams[self._name] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._streams[self._name] -= 1
