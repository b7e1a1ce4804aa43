"""Checks of one machine: software, variables, threads, files, tools, network interface."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import torch
import torch.distributed as dist

from outergrad._amounts import amount, many
from outergrad.core.packages import how_to_install, is_installed
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.machine import cores, versions
from outergrad.launch.traffic import Interfaces, interfaces
from outergrad.tools.doctor.findings import Finding, named, note, ok, problem, warning


def look_at_machine(*, sites_here: int = 1) -> list[Finding]:
    """Checks this machine, on which `sites_here` sites run."""
    folder = tempfile.gettempdir()
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus and dist.is_nccl_available() else ()  # pyright: ignore[reportAttributeAccessIssue]
    return [
        *check_software(versions(), dist.is_available() and dist.is_gloo_available()),
        *check_gpus(gpus, torch.version.cuda, ".".join(map(str, nccl))),
        *check_extras(is_installed),
        *check_interface(taken_here(), socket.gethostname(), interfaces()),
        *check_threads(os.environ, torch.get_num_threads(), cores(), sites_here),
        *check_variables(os.environ),
        *check_room(_most_open_files(), folder, shutil.disk_usage(folder).free),
        *check_shaping(what_is_missing(ShapedLink(rate_bit_per_s=1e8), 2)),
    ]


LEAST = {"python": "3.10", "torch": "2.11", "numpy": "1.26"}
"""Oldest supported versions, as in pyproject.toml."""


def check_software(versions: Mapping[str, str], has_gloo: bool) -> Iterator[Finding]:
    """Checks that versions are new enough, and that torch has gloo."""
    for name, least in LEAST.items():
        version, remedy = versions[name], f"pip install --upgrade '{name}>={least}'"
        if name == "python":
            remedy = f"install Python {least} or later"
        if _numbers(version) < _numbers(least):
            yield problem(name, f"{version} is too old: {least} or later is needed", remedy)
        else:
            yield ok(name, version)
    if has_gloo:
        yield ok("gloo", "available: this is what carries the exchange between sites")
    else:
        said = "this build of torch has no gloo, which carries the exchange between sites"
        yield problem("gloo", said, "install torch from pytorch.org or with pip")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_gpus(names: Sequence[str], cuda: str | None, nccl: str) -> Iterator[Finding]:
    """Reports the GPUs that torch finds, with versions; none are needed."""
    if names:
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        carried = f"NCCL {nccl}" if nccl else "without NCCL"
        yield ok("GPU", f"{counted}, CUDA {cuda}; {carried}")
    elif cuda:
        said = f"torch is built for CUDA {cuda} but sees no GPU: training runs on the processor"
        yield note("GPU", said, "if this machine has one, see whether `nvidia-smi` finds it")
    else:
        yield ok("GPU", "none, and none needed: training runs on the processor")


EXTRAS = {
    "cli": (("typer", "rich", "sklearn", "psutil"), "the command line"),
    "bench": (("matplotlib", "seaborn"), "plots of `outergrad bench`"),
    "report": (("pandas", "plotly"), "reports of a run"),
    "star": (("grpc", "cryptography"), "sites around a hub"),
    "tensorboard": (("tensorboard",), "runs in TensorBoard"),
}
"""Modules that each extra installs, and their purpose."""


def check_extras(has: Callable[[str], bool]) -> Iterator[Finding]:
    """Reports which extras are installed; `has` tells if a module can be imported."""
    there = [name for name, (modules, _) in EXTRAS.items() if all(map(has, modules))]
    if there:
        yield ok("extras", f"installed: {', '.join(there)}")
    for name, (modules, use) in EXTRAS.items():
        absent = [module for module in modules if not has(module)]
        if absent:
            yield note("extras", f"{name} is not installed: {use}", how_to_install(*absent))


@dataclass(frozen=True)
class Taken:
    """Address at which gloo will listen, and its interface, if known."""

    address: str | None  # None if gloo will not start
    interface: str | None
    why: str  # "variable", "hostname", or "fallback" if the machine's name does not help


def taken_here() -> Taken:
    """Returns the address that gloo will use on this machine."""
    return taken_by_gloo(os.environ, socket.gethostname(), interfaces())


def resolve(host: str) -> list[str]:
    """Addresses of a host name; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def taken_by_gloo(
    environment: Mapping[str, str],
    host: str,
    present: Interfaces,
    lookup: Callable[[str], list[str]] = resolve,
) -> Taken:
    """Returns the address that gloo will use, by its own rules, on a machine of this name."""
    if wanted := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return Taken(next(iter(present.get(wanted, ())), None), wanted, "variable")
    holders = {address: name for name, addresses in present.items() for address in addresses}
    for address in lookup(host):
        if address in holders or ip_address(address).is_loopback:
            return Taken(address, holders.get(address), "hostname")
    return Taken("127.0.0.1", holders.get("127.0.0.1"), "fallback")


def check_interface(taken: Taken, host: str, present: Interfaces) -> Iterator[Finding]:
    """Checks that gloo starts on the machine of this name, and that others can reach it."""
    if taken.address is None:
        said = f"GLOO_SOCKET_IFNAME names {taken.interface}, which is not there or has no address"
        remedy = f"choose one of {', '.join(sorted(present))}, or unset it"
        yield problem("interface", f"{said}: gloo will not start", remedy)
        return
    because = {
        "variable": "as GLOO_SOCKET_IFNAME says",
        "hostname": f"the address of this machine's name, {host}",
        "fallback": f"since this machine's name, {host}, is not known as an address of it",
    }[taken.why]
    said = f"gloo will use {taken.address} ({taken.interface or '?'}), {because}"
    number = ip_address(taken.address)
    if number.version == 6 and number.is_link_local:
        said += ", an address that holds on this one cable alone"
        remedy = "give the interface an address for other machines, or name another one"
        yield problem("interface", said, f"{remedy} in GLOO_SOCKET_IFNAME")
        return
    if not number.is_loopback:
        yield ok("interface", said)
        return
    said += "; that does for sites on this machine, but no other machine can reach it"
    remedy = "connect this machine to a network first"
    if outward := best_interface(present):
        remedy = "export GLOO_SOCKET_IFNAME={}  ({})".format(*outward)
    level = note if taken.why == "variable" else warning
    yield level("interface", said, remedy)


def check_addresses(addresses: Mapping[int, str]) -> Iterator[Finding]:
    """Checks that sites on several machines listen at suitable addresses, given by rank."""
    local = [rank for rank, address in addresses.items() if ip_address(address).is_loopback]
    public = [rank for rank, address in addresses.items() if ip_address(address).is_global]
    if local:
        said = f"{named(local)} listens at {addresses[local[0]]}, where no other machine "
        said += "can reach it"
        remedy = "name the interface that leads to the others there, as GLOO_SOCKET_IFNAME=eth0"
        yield problem("addresses", said, remedy)
    elif public:
        said = f"{named(public)} uses a public address: PyTorch neither encrypts nor asks who "
        said += "is calling"
        remedy = "use a private network or a VPN, and name its interface in GLOO_SOCKET_IFNAME"
        yield warning("addresses", said, remedy)
    else:
        yield ok("addresses", "all private: none is of the open internet")


def check_kinds(addresses: Mapping[int, str]) -> Iterator[Finding]:
    """Reports sites that listen by IPv4 beside sites that listen by IPv6, given by rank."""
    by_4 = [rank for rank, address in addresses.items() if ip_address(address).version == 4]
    by_6 = [rank for rank in addresses if rank not in by_4]
    if by_4 and by_6:
        said = f"{named(by_4)} by IPv4, at {addresses[by_4[0]]}, and {named(by_6)} by IPv6, at "
        said += f"{addresses[by_6[0]]}: gloo joins only sites of one kind"
        remedy = "name interfaces with addresses of one kind in GLOO_SOCKET_IFNAME; where one has "
        yield problem("addresses", said, f"{remedy}both, gloo takes IPv4")


_VIRTUAL = ("docker", "br-", "virbr", "veth", "tailscale", "wg", "tun", "tap")


def best_interface(present: Interfaces) -> tuple[str, str] | None:
    """Returns the interface that probably leads to other machines, and its address there."""
    outward = [
        (name, address)
        for name, addresses in present.items()
        for address in addresses
        if not (ip_address(address).is_loopback or ip_address(address).is_link_local)
    ]
    return min(outward, key=lambda found: found[0].startswith(_VIRTUAL), default=None)


def check_threads(
    environment: Mapping[str, str], threads: int, cores: int, sites: int
) -> Iterator[Finding]:
    """Checks that PyTorch's threads fit the cores that the sites of this machine share."""
    wanted = max(1, cores // sites)
    said = f"{threads} for {many(cores, 'core')}"
    said += f" and {sites} sites on this machine" if sites > 1 else ""
    remedy = f"export OMP_NUM_THREADS={wanted}"
    fitting = cores // threads
    if threads > wanted:
        yield warning("threads", f"{said}: they will fight for them", remedy)
    elif threads < wanted and sites == 1 and fitting > 1:
        said += f": right for {fitting} sites on this machine; one alone leaves some idle"
        yield note("threads", said, f"{remedy}, if one site runs here")
    elif threads < wanted:
        why = " (torchrun sets OMP_NUM_THREADS=1)" if "TORCHELASTIC_RUN_ID" in environment else ""
        yield note("threads", f"{said}: some stay idle{why}", remedy)
    else:
        yield ok("threads", said)


_SET = r"(?!0?$).*"
_BROKEN = "unset {name}, unless that is broken here"
VARIABLES: dict[str, tuple[str, Callable[..., Finding], str, str]] = {
    "TORCH_DISTRIBUTED_DEBUG": (
        "DETAIL",
        warning,
        "{name}=DETAIL makes every exchange some 8 ms slower",
        "unset {name}, unless you are looking for a hang",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        _SET,
        warning,
        "{name} makes the processor wait for every kernel: training is much slower",
        "unset {name}, unless you are looking for an error in a kernel",
    ),
    "GLOO_DEVICE_TRANSPORT": ("TCP_TLS", note, "{name}=TCP_TLS: every site must have it", ""),
    "CUDA_VISIBLE_DEVICES": ("|-1", note, "{name} hides every GPU", "unset it to train on one"),
    "NCCL_DEBUG": (
        "INFO|TRACE",
        note,
        "{name}={value} writes a lot to the terminal",
        "unset {name}",
    ),
    "NCCL_SOCKET_IFNAME": (
        ".*",
        note,
        "{name}={value} is not for gloo, which heeds GLOO_SOCKET_IFNAME alone",
        "set both, where both are used",
    ),
    "NCCL_P2P_DISABLE": (_SET, note, "{name} forbids NCCL to copy straight between GPUs", _BROKEN),
    "NCCL_IB_DISABLE": (_SET, note, "{name} forbids NCCL InfiniBand", _BROKEN),
}
"""Environment variables with surprising effects: pattern of values, level, sentence, remedy."""


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Reports environment variables that will surprise the user."""
    found = {
        name: value
        for name, (surprising, *_) in VARIABLES.items()
        if (value := environment.get(name)) is not None
        and re.fullmatch(surprising, value, re.IGNORECASE | re.DOTALL)
    }
    for name, value in found.items():
        _, level, said, remedy = VARIABLES[name]
        yield level("variables", said.format(name=name, value=value), remedy.format(name=name))
    if not found:
        yield ok("variables", "no environment variable that is known to hurt")


_LEAST_FILES = 256
_LEAST_DISK_BYTES = 1_000_000_000


def check_room(most_files: int | None, folder: str, free_bytes: int) -> Iterator[Finding]:
    """Checks that a process may open enough sockets, and that temporary files have room."""
    if most_files is None:
        yield ok("open files", "no limit")
    elif most_files < _LEAST_FILES:
        said = f"a process may open only {most_files}, sockets included"
        yield warning("open files", said, "ulimit -n 1024")
    else:
        yield ok("open files", f"up to {most_files:,}")
    said = f"{amount(free_bytes)} free in {folder}"
    if free_bytes < _LEAST_DISK_BYTES:
        yield warning("disk", said, "make room, or let TMPDIR name another folder")
    else:
        yield ok("disk", said)


def _most_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def check_shaping(missing: str | None) -> Iterator[Finding]:
    """Reports if `outergrad bench` can limit links here; `missing` says why not."""
    if missing is None:
        yield ok("slow links", "`outergrad bench --link` can make them on this machine")
    else:
        yield note("slow links", f"for `outergrad bench` alone: {missing}")
