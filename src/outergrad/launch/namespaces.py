"""Network namespaces for the sites of a benchmark, joined by shaped cables.

Needs Linux, root and ``iproute2``. Every name contains the id of the process that made it, and a
mark of the boot and container in which that id is valid. A janitor process removes all namespaces
when their process leaves or is gone, however it ended.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from outergrad.launch.errors import RecipeError
from outergrad.launch.processes import exit_on_signals

SOURCE = Path(__file__).with_name("relay.c")
_REMEDY = "mend it, or leave out --latency"


def can_relay() -> bool:
    """True if this machine has what the relay needs, besides root."""
    return shutil.which("cc") is not None and os.path.exists("/dev/net/tun")


@contextmanager
def relay(namespace: str, taps: Sequence[str], delay_s: float) -> Iterator[None]:
    """Adds TAP devices to a network namespace and copies Ethernet frames between them.

    Args:
        namespace: Name of the namespace.
        taps: Names of the devices, which vanish on leaving.
        delay_s: Delay of each frame, in seconds.

    Raises:
        RecipeError: The relay cannot be compiled or started, or ended before its time.
    """
    # The folder goes once the relay runs: nothing stays on the disk if this process is killed.
    with TemporaryDirectory(prefix="outergrad-") as folder:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, _compile(folder), f"{delay_s * 1e9:.0f}", *taps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the relay
        )
        assert process.stdout is not None
        said = process.stdout.readline()
    with process:
        if said != "ready\n":
            raise RecipeError(f"--latency: the relay does not start ({said.strip()}): {_REMEDY}")
        yield
        if process.poll() is not None:
            why = " ".join(process.stdout.read().split()) or f"code {process.returncode}"
            raise RecipeError(f"--latency: the relay ended too early ({why}): try again")


def _compile(folder: str) -> str:
    program = os.path.join(folder, "relay")
    done = subprocess.run(["cc", "-O2", "-o", program, str(SOURCE)], capture_output=True, text=True)
    if done.returncode != 0:
        why = next(iter(done.stderr.splitlines()), f"code {done.returncode}")
        raise RecipeError(f"--latency: cannot compile the relay ({why}): {_REMEDY}")
    return program


INTERFACE = "link0"
MOST_SITES = 64

_Plug = tuple[str, str]  # a namespace and an interface in it

# Without the word `done` the program was killed, perhaps while one of its commands was adding
# a namespace. The second removal takes what that command leaves.
_JANITOR = """
trap '' INT TERM HUP
remove() { for name; do ip netns del "$name"; done; }
read -r word
remove "$@"
[ "$word" = done ] || { sleep 0.5; remove "$@"; }
"""


@contextmanager
def namespaces(sites: int, rate_bit_per_s: float | None, rtt_s: float) -> Iterator[list[str]]:
    """Yields the names of one network namespace per site; all sites can reach one another.

    Site ``s`` has the address ``10.77.0.(s+1)`` on the interface ``link0``.

    Args:
        sites: Number of sites.
        rate_bit_per_s: Rate at which each end of each cable may send; None for no limit.
        rtt_s: Round-trip time between two sites, in seconds.

    Raises:
        RecipeError: A command failed.
    """
    _remove_abandoned()
    prefix = f"outergrad-{os.getpid()}-{mark()}-{secrets.token_hex(2)}"
    names = [f"{prefix}-{site}" for site in range(sites)]
    hub = f"{prefix}-hub"
    with ExitStack() as stack:
        stack.enter_context(exit_on_signals())
        stack.enter_context(_janitor([*names, hub]))
        for name in [*names, hub]:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        stack.enter_context(_joined(names, hub, rate_bit_per_s, rtt_s))
        for site, name in enumerate(names):
            address = f"10.77.0.{site + 1}/24"
            _run("ip", "-n", name, "addr", "add", address, "dev", INTERFACE)
            _up(name, INTERFACE)
        yield names


def has_netem() -> bool:
    """True if this kernel can delay packets by itself."""
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def qdiscs(rate_bit_per_s: float | None, delay_s: float = 0.0) -> list[list[str]]:
    """Returns arguments of ``tc qdisc add`` that make an interface send at a rate, after a delay.

    The burst is what passes at full speed after a pause: two packets, or 0.25 ms worth of
    the rate, so that a step of a few kilobytes does not slip through unshaped. The queue is
    long enough that TCP loses nothing; one stream then reaches 95% of the rate as payload.
    netem's own limit counts packets, and must not be what limits the link.
    """
    commands = []
    if delay_s:
        delay = f"{delay_s * 1e6:.0f}us"
        commands.append(["root", "handle", "1:", "netem", "delay", delay, "limit", "1000000"])
    if rate_bit_per_s is not None:
        bytes_per_s = rate_bit_per_s / 8
        tbf = ["tbf", "rate", f"{rate_bit_per_s:.0f}bit"]
        tbf += ["burst", f"{max(4096, bytes_per_s / 4000):.0f}b"]
        tbf += ["limit", f"{max(1 << 20, bytes_per_s / 20):.0f}b"]
        commands.append([*(["parent", "1:"] if delay_s else ["root"]), *tbf])
    return commands


def mark() -> str:
    """Returns a digest of this boot of the machine and of this container's process namespace.

    A process id means the same process only within both. Containers may share the folder of the
    network namespaces, and see other processes.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]


def _remove_abandoned() -> None:
    """Removes namespaces of this container that outlived both their process and their janitor."""
    listed = _run("ip", "netns", "list")
    for name in re.findall(rf"^outergrad-\d+-{mark()}-\S+", listed, re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            _run("ip", "netns", "del", name, check=False)


@contextmanager
def _janitor(names: list[str]) -> Iterator[None]:
    """Removes namespaces on leaving, or when this process is gone.

    Both close a pipe that the janitor process reads. It has a session of its own, so that no signal
    for this process reaches it. It knows all names before there is anything to remove.
    """
    janitor = subprocess.Popen(
        ["sh", "-c", _JANITOR, "sh", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with janitor:
        try:
            yield
        finally:
            janitor.communicate(b"done\n")


@contextmanager
def _joined(names: list[str], hub: str, rate: float | None, rtt_s: float) -> Iterator[None]:
    """Joins two sites by a cable, more by a bridge, and for latency without netem by the relay.

    Every end of every cable is shaped, so that both the uplink and the downlink of a site are.
    """
    with ExitStack() as stack:
        netem_s = rtt_s / 2 if rtt_s and has_netem() else 0.0
        if rtt_s and not netem_s:
            ports = _star(names, hub)
            stack.enter_context(_relayed(hub, ports, rtt_s / 2))
        elif len(names) == 2:
            ports = []
            _cable((names[0], INTERFACE), (names[1], INTERFACE))
        else:
            ports = _star(names, hub)
            _bridge(hub, "bridge0", ports)
        for name in names:
            _shape(name, INTERFACE, qdiscs(rate, netem_s))
            if rtt_s:
                _enlarge_buffers(name, rate, rtt_s)
        for port in ports:
            _shape(hub, port, qdiscs(rate))
        yield


def _star(names: list[str], hub: str) -> list[str]:
    """Connects every site by a cable to a port of its own in the hub."""
    ports = [f"port{site}" for site in range(len(names))]
    for name, port in zip(names, ports, strict=True):
        _cable((name, INTERFACE), (hub, port))
    return ports


def _cable(first: _Plug, second: _Plug) -> None:
    _run(
        *("ip", "link", "add", first[1], "netns", first[0], "type", "veth"),
        *("peer", "name", second[1], "netns", second[0]),
    )


@contextmanager
def _relayed(hub: str, ports: list[str], delay_s: float) -> Iterator[None]:
    """Joins each port to a TAP of its own; the relay copies frames from TAP to TAP.

    A TAP in place of the cable would leave what a site receives unshaped: only what an interface
    sends can be shaped.
    """
    taps = [f"tap{site}" for site in range(len(ports))]
    with relay(hub, taps, delay_s):
        for site, (port, tap) in enumerate(zip(ports, taps, strict=True)):
            # The queue holds 10 ms at 10 Gbit/s: a busy processor may keep the relay from
            # reading for as long.
            _run("ip", "-n", hub, "link", "set", tap, "txqueuelen", "10000")
            _bridge(hub, f"bridge{site}", [port, tap])
        yield


def _bridge(hub: str, bridge: str, ports: Sequence[str]) -> None:
    _run("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
    _up(hub, bridge)
    for port in ports:
        _run("ip", "-n", hub, "link", "set", port, "master", bridge)
        _up(hub, port)


def _up(namespace: str, interface: str) -> None:
    # IPv6 would announce itself, and its packets be counted. Without IPv6 this command fails, and
    # is not needed.
    _run("ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none", check=False)
    _run("ip", "-n", namespace, "link", "set", interface, "up")


def _shape(namespace: str, interface: str, disciplines: list[list[str]]) -> None:
    for discipline in disciplines:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *discipline)


def _enlarge_buffers(namespace: str, rate_bit_per_s: float | None, rtt_s: float) -> None:
    """Enlarges TCP's buffers so that it can keep a long link full, whatever the machine's defaults.

    The kernel counts a buffer's overhead, and wants twice the bytes in flight: hence four times.
    """
    on_the_way = (rate_bit_per_s or 1e10) / 8 * rtt_s
    most = f"{min(1 << 30, max(1 << 25, 4 * on_the_way)):.0f}"
    for name, least in (("rmem", "4096 131072"), ("wmem", "4096 16384")):
        script = f"echo {least} {most} > /proc/sys/net/ipv4/tcp_{name}"
        _run("ip", "netns", "exec", namespace, "sh", "-c", script)


def _run(*command: str, check: bool = True) -> str:
    # A session of its own: Ctrl-C ends this program, and not a command halfway.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if check and done.returncode != 0:
        why = " ".join(done.stderr.split()) or f"code {done.returncode}"
        raise RecipeError(f"--link: `{' '.join(command)}` failed ({why}): use --link loopback")
    return done.stdout
