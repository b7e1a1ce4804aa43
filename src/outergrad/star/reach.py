"""Reasons why a site does not reach its hub, found by calling it once without gRPC.

gRPC tells most of them in the words of its own source. Here each has a type, and so its own words.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import Any

from outergrad.core.addresses import Address, read_address
from outergrad.star.authority import Kit, now, read_certificate

_LIMIT_S, _LEAST_S = 3.0, 1.0
_NO_WAY, _SILENT, _REFUSED, _ANSWERED = range(4)
_OTHER_NAME = {62, 64}
"""OpenSSL's codes of a certificate for another name or address."""
_EXPIRED, _NOT_YET = 10, 9


@dataclass(frozen=True)
class Obstacle:
    """A reason why the hub is not reached.

    Attributes:
        why: in words, with what to do.
        lasts: whether waiting does not help, as with a kit of another hub.
        how_far: how far on the way to the hub it lies.
    """

    why: str
    lasts: bool = False
    how_far: int = field(default=_NO_WAY, compare=False)


def obstacle(address: str, kit: Kit, limit_s: float = _LIMIT_S) -> Obstacle | None:
    """Calls the hub once; returns why it is not reached, or None if that is not known.

    A name may have addresses of IPv6 and of IPv4. gRPC tries all, so each is called here, too.
    Returned is the obstacle that lies farthest on the way: where a hub is down, this machine may
    besides have no way to one of its addresses.

    Args:
        address: host and port of the hub.
        kit: of the site.
        limit_s: timeout of each part of the call, seconds; several addresses share it.
    """
    if read_certificate(kit.certificate).not_valid_after_utc < now():
        return Obstacle("the certificate in the kit has expired: ask for a new kit", lasts=True)
    hub = read_address(address)
    try:
        found = socket.getaddrinfo(hub.host, hub.port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        told = f"the name {hub.host} is not known here: check it, and this machine's DNS"
        return Obstacle(told)
    each_s = max(limit_s / len(found), min(limit_s, _LEAST_S))
    met = [_at(place[0], hub, kit, each_s) for *_, place in found]
    return None if None in met else _farthest([one for one in met if one is not None])


def _farthest(met: list[Obstacle]) -> Obstacle:
    """Returns the obstacle to tell of; one that lasts only if all do, since gRPC tries them all."""
    passing = [one for one in met if not one.lasts]
    return max(passing or met, key=lambda one: one.how_far)


def _at(number: Any, hub: Address, kit: Kit, limit_s: float) -> Obstacle | None:
    """Calls one address of the hub, given by its number."""
    host, port = hub
    try:
        with socket.create_connection((number, port), limit_s) as plain:
            return _in_tls(plain, host, port, kit)
    except ConnectionRefusedError:
        told = f"nobody listens on port {port} of {host}: the hub does not run, or has another port"
        return Obstacle(told, how_far=_REFUSED)
    except TimeoutError:
        told = f"{host} does not answer on port {port}: a wrong address, or a firewall"
        return Obstacle(told, how_far=_SILENT)
    except OSError as error:
        why = error.strerror or str(error)
        return Obstacle(f"{host} cannot be reached ({why}): check this machine's network")


def _in_tls(plain: socket.socket, host: str, port: int, kit: Kit) -> Obstacle | None:
    """Proves the identity of who answers; the site's own is for gRPC to prove."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=kit.authority)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as error:
        why = _of_certificate(error.verify_code, host, port)
        return Obstacle(why, lasts=True, how_far=_ANSWERED)
    except TimeoutError:
        why = f"{host} answers on port {port}, but not in TLS: is that the hub's port?"
        return Obstacle(why, how_far=_ANSWERED)
    except OSError:
        why = f"who answers on port {port} of {host} is no hub: check the port"
        return Obstacle(why, how_far=_ANSWERED)


def _of_certificate(code: int, host: str, port: int) -> str:
    if code in _OTHER_NAME:
        return (
            f"the hub's certificate is not for the name {host}: use the name that the hub was made "
            f"for, or make it with `outergrad hub init --host {host}`"
        )
    if code in (_EXPIRED, _NOT_YET):
        return "the hub's certificate is not valid now: make a new hub, or set this machine's clock"
    return (
        f"who answers on port {port} of {host} is not the hub of this kit: this is a kit of "
        f"another hub, the hub was made anew, or a proxy opens TLS"
    )
