"""Reasons why a site does not reach its hub, found by calling it once without gRPC.

gRPC tells most of them in the words of its own source. Here each has a type, and so its own words.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from outergrad.star.authority import Kit, now, read_certificate

_LIMIT_S = 3.0
_OTHER_NAME = {62, 64}
"""OpenSSL's codes of a certificate for another name or address."""
_EXPIRED, _NOT_YET = 10, 9


@dataclass(frozen=True)
class Obstacle:
    """A reason why the hub is not reached.

    Attributes:
        why: in words, with what to do.
        lasts: whether waiting does not help, as with a kit of another hub.
    """

    why: str
    lasts: bool = False


def obstacle(address: str, kit: Kit, limit_s: float = _LIMIT_S) -> Obstacle | None:
    """Calls the hub once; returns why it is not reached, or None if that is not known.

    Args:
        address: host and port of the hub.
        kit: of the site.
        limit_s: timeout of each part of the call, seconds.
    """
    if read_certificate(kit.certificate).not_valid_after_utc < now():
        return Obstacle("the certificate in the kit has expired: ask for a new kit", lasts=True)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), limit_s) as plain:
            return _in_tls(plain, host, port, kit)
    except socket.gaierror:
        return Obstacle(f"the name {host} is not known here: check it, and this machine's DNS")
    except ConnectionRefusedError:
        told = f"nobody listens on port {port} of {host}: the hub does not run, or has another port"
        return Obstacle(told)
    except TimeoutError:
        told = f"{host} does not answer on port {port}: a wrong address, or a firewall"
        return Obstacle(told)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Obstacle(f"{host} cannot be reached ({why}): check this machine's network")


def _in_tls(plain: socket.socket, host: str, port: str, kit: Kit) -> Obstacle | None:
    """Proves the identity of who answers; the site's own is for gRPC to prove."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=kit.authority)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=host):
            return None
    except ssl.SSLCertVerificationError as error:
        return Obstacle(_of_certificate(error.verify_code, host, port), lasts=True)
    except TimeoutError:
        return Obstacle(f"{host} answers on port {port}, but not in TLS: is that the hub's port?")
    except OSError:
        return Obstacle(f"who answers on port {port} of {host} is no hub: check the port")


def _of_certificate(code: int, host: str, port: str) -> str:
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
