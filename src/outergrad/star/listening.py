"""A check that a hub can listen on its address, with a clearer error than gRPC's."""

import os
import socket


def refuse_taken(listen: str) -> None:
    """Raises if the port cannot be used, by opening it for a moment.

    Args:
        listen: Address and port of this machine, as ``[::]:8443``; port 0 is always free.

    Raises:
        OSError: Another program has the port, or it is no address of this machine's.
    """
    try:
        _open(listen)
    except (OSError, ValueError) as error:
        raise OSError(f"cannot listen on {listen} ({_why(error)}): use another --listen") from None


def _open(listen: str) -> None:
    host, _, number = listen.rpartition(":")
    host, port = host.strip("[]"), int(number)
    if not 0 <= port < 1 << 16:
        raise ValueError("no port")
    family = socket.getaddrinfo(host or None, port)[0][0]
    both = host == "::" and socket.has_dualstack_ipv6()
    with socket.create_server((host, port), family=family, dualstack_ipv6=both):
        pass


def _why(error: Exception) -> str:
    if isinstance(error, socket.gaierror) or not isinstance(error, OSError):
        return "no address and port"
    return os.strerror(error.errno or 0)
