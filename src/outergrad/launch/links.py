"""Links between the sites of a benchmark, and the network places in which sites run."""

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outergrad.launch.errors import RecipeError
from outergrad.launch.namespaces import INTERFACE, MOST_SITES, can_relay, has_netem, namespaces
from outergrad.launch.traffic import loopback_name

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"ms": 1e-3, "s": 1.0}
_LOWEST_BIT_PER_S, _HIGHEST_BIT_PER_S = 8e3, 100e9
_LONGEST_RTT_S = 10.0
_RATE_HELP = "write none, loopback or a rate from 8kbit to 100gbit, such as 10mbit"
_RTT_HELP = "write a time from 0ms to 10s, such as 40ms"
_DECIMAL = r"\d+\.?\d*|\.\d+"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class ShapedLink:
    """Link of every site to the others.

    Attributes:
        rate_bit_per_s: Rate at which a site can send, and can receive; None for no limit.
        rtt_s: Round-trip time between two sites, in seconds.
        loopback: Whether the sites share this machine's own network instead.

    Raises:
        RecipeError: Such a link cannot be made.
    """

    rate_bit_per_s: float | None
    rtt_s: float = 0.0
    loopback: bool = False

    def __post_init__(self) -> None:
        rate = self.rate_bit_per_s
        if rate is not None and not _LOWEST_BIT_PER_S <= rate <= _HIGHEST_BIT_PER_S:
            raise RecipeError(f"--link: a rate of {rate:g} bit/s cannot be had: {_RATE_HELP}")
        if not 0 <= self.rtt_s <= _LONGEST_RTT_S:
            raise RecipeError(f"--latency: {self.rtt_s:g} s cannot be had: {_RTT_HELP}")
        if self.loopback and (self.rtt_s or rate is not None):
            raise RecipeError(
                "--latency: --link loopback has neither latency nor rate: leave out --latency, "
                "or use --link none"
            )

    @property
    def name(self) -> str:
        """Link as the command line writes it, such as ``100mbit-40ms``."""
        if self.loopback:
            return "loopback"
        rate = "none" if self.rate_bit_per_s is None else _rate_name(self.rate_bit_per_s)
        return f"{rate}-{_number(self.rtt_s * 1e3)}ms" if self.rtt_s else rate


@dataclass(frozen=True)
class Place:
    """Network place of one site.

    Attributes:
        namespace: Name of its network namespace; None for this machine's own network.
        interface: Network interface for the exchange.
    """

    namespace: str | None
    interface: str

    def enter(self) -> None:
        """Moves the calling process into the namespace, and makes gloo use the interface.

        Call it from the main thread of the site's process: existing threads stay where they are.

        Raises:
            OSError: The namespace is gone, or the process may not enter it.
        """
        if self.namespace is not None:
            _enter_namespace(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


def parse_link(rate: str, latency: str = "0ms", option: str = "--latency") -> ShapedLink:
    """Parses a link from the command line.

    Args:
        rate: ``none``, ``loopback``, or a number with ``kbit``, ``mbit`` or ``gbit``.
        latency: Seconds there and back, as a number with ``ms`` or ``s``.
        option: Name of the option that gave `latency`, for errors.

    Raises:
        RecipeError: The text cannot be read, or such a link cannot be made.
    """
    word = rate.strip().lower()
    rtt_s = _quantity(option, latency, _TIME_UNITS, _RTT_HELP)
    if word in ("none", "loopback"):
        return ShapedLink(rate_bit_per_s=None, rtt_s=rtt_s, loopback=word == "loopback")
    return ShapedLink(rate_bit_per_s=parse_rate(rate, "--link"), rtt_s=rtt_s)


def parse_rate(rate: str, option: str) -> float:
    """Parses a rate in bit/s from the command line.

    Raises:
        RecipeError: It cannot be read; the error names the option.
    """
    return _quantity(option, rate, _RATE_UNITS, _RATE_HELP)


def what_is_missing(link: ShapedLink, sites: int) -> str | None:
    """Returns in one line why sites cannot be joined by a link here; None if they can."""
    if link.loopback:
        return None
    if sites > MOST_SITES:
        return f"--sites {sites}: --link {link.name} joins at most {MOST_SITES}: lower it"
    if sys.platform != "linux":
        return f"--link {link.name} needs Linux: use --link loopback"
    if os.geteuid() != 0:
        return f"--link {link.name} needs root: run as root, or use --link loopback"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"--link {link.name} needs `{tool}`: install iproute2, or use --link loopback"
    if link.rtt_s and not (can_relay() or has_netem()):
        needs = "netem in the kernel, or `cc` and /dev/net/tun"
        return f"--latency needs {needs}: add one, or leave it out"
    return None


@contextmanager
def places(sites: int, link: ShapedLink) -> Iterator[list[Place]]:
    """Yields one place per site, joined by a link; removes the places on leaving.

    While they exist, SIGTERM and SIGHUP end the program in order. Network namespaces are removed
    even if the program is killed.

    Args:
        sites: Number of sites.
        link: Link that joins the sites.

    Raises:
        RecipeError: This machine lacks something, or a command failed.
    """
    if missing := what_is_missing(link, sites):
        raise RecipeError(missing)
    if link.loopback:
        yield [Place(None, loopback_name() or "lo")] * sites
        return
    with namespaces(sites, link.rate_bit_per_s, link.rtt_s) as names:
        yield [Place(name, INTERFACE) for name in names]


def _quantity(option: str, text: str, units: dict[str, float], wanted: str) -> float:
    read = re.fullmatch(rf"({_DECIMAL}) ?({'|'.join(units)})", text.strip().lower())
    if read is None:
        raise RecipeError(f"{option} {text!r} cannot be read: {wanted}")
    return float(read[1]) * units[read[2]]


def _rate_name(rate_bit_per_s: float) -> str:
    unit, scale = [item for item in _RATE_UNITS.items() if item[1] <= rate_bit_per_s][-1]
    return f"{_number(rate_bit_per_s / scale)}{unit}"


def _number(value: float) -> str:
    return f"{value:.12g}"  # hides what binary fractions add, as in 0.55 * 1e3


def _enter_namespace(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with Path("/var/run/netns", name).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), file.name)
