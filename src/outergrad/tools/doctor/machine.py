"""Checks of one machine: software, variables, threads, files, tools, network interface."""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import psutil
import torch
import torch.distributed as dist

from outergrad._amounts import amount, many
from outergrad.launch.links import ShapedLink, what_is_missing
from outergrad.launch.machine import cores, versions
from outergrad.tools.doctor.findings import Finding, named, note, ok, problem, warning

_VIRTUAL = ("docker", "br-", "virbr", "veth", "tailscale", "wg", "tun", "tap")

Interfaces = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Taken:
    """Address at which gloo will listen, and its interface, if known."""

    address: str | None  # None if gloo will not start
    interface: str | None
    why: str  # "variable", "hostname", or "fallback" if the machine's name does not help


def interfaces() -> dict[str, list[str]]:
    """Addresses of each network interface that is up."""
    state, kinds = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return {
        name: [a.address.partition("%")[0] for a in addresses if a.family in kinds]
        for name, addresses in psutil.net_if_addrs().items()
        if name in state and state[name].isup
    }


def resolve(host: str) -> list[str]:
    """Addresses of a host name; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def taken_here(environment: Mapping[str, str]) -> Taken:
    """Returns the address that gloo will use on this machine."""
    return taken_by_gloo(environment, socket.gethostname(), interfaces())


def taken_by_gloo(
    environment: Mapping[str, str],
    host: str,
    present: Interfaces,
    lookup: Callable[[str], list[str]] = resolve,
) -> Taken:
    """Returns the address that gloo will use, by its own rules, on a machine of this name."""
    if wanted := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return Taken(next(iter(present.get(wanted, ())), None), wanted, "variable")
    for address in lookup(host):
        holder = _holder(address, present)
        if holder or ipaddress.ip_address(address).is_loopback:
            return Taken(address, holder, "hostname")
    return Taken("127.0.0.1", _holder("127.0.0.1", present), "fallback")


def _holder(address: str, present: Interfaces) -> str | None:
    return next((name for name, addresses in present.items() if address in addresses), None)


def best_interface(present: Interfaces) -> str | None:
    """Returns the interface that probably leads to other machines."""
    outward = [name for name, addresses in present.items() if any(map(_reachable, addresses))]
    return min(outward, key=lambda name: name.startswith(_VIRTUAL), default=None)


def _reachable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local)


def check_interface(taken: Taken, host: str, present: Interfaces) -> Finding:
    """Checks that gloo starts on the machine of this name, and that others can reach it."""
    if taken.address is None:
        said = f"GLOO_SOCKET_IFNAME names {taken.interface}, which is not there or has no address"
        remedy = f"choose one of {', '.join(sorted(present))}, or unset it"
        return problem("interface", f"{said}: gloo will not start", remedy)
    because = {
        "variable": "as GLOO_SOCKET_IFNAME says",
        "hostname": f"the address of this machine's name, {host}",
        "fallback": f"since this machine's name, {host}, is not known as an address of it",
    }[taken.why]
    said = f"gloo will use {taken.address} ({taken.interface or '?'}), {because}"
    if not ipaddress.ip_address(taken.address).is_loopback:
        return ok("interface", said)
    said += "; that does for sites on this machine, but no other machine can reach it"
    remedy = "connect this machine to a network first"
    if best := best_interface(present):
        address = next(filter(_reachable, present[best]))
        remedy = f"export GLOO_SOCKET_IFNAME={best}  ({address})"
    level = note if taken.why == "variable" else warning
    return level("interface", said, remedy)


def check_addresses(addresses: Mapping[int, str]) -> list[Finding]:
    """Checks that sites on several machines listen at suitable addresses, given by rank."""
    ips = {rank: ipaddress.ip_address(address) for rank, address in addresses.items()}
    if local := [rank for rank, ip in ips.items() if ip.is_loopback]:
        said = f"{named(local)} listens at {addresses[local[0]]}, where no other machine "
        said += "can reach it"
        remedy = "name the interface that leads to the others there, as GLOO_SOCKET_IFNAME=eth0"
        return [problem("addresses", said, remedy)]
    if public := [rank for rank, ip in ips.items() if ip.is_global]:
        said = f"{named(public)} uses a public address: PyTorch neither encrypts nor asks who "
        said += "is calling"
        remedy = "use a private network or a VPN, and name its interface in GLOO_SOCKET_IFNAME"
        return [warning("addresses", said, remedy)]
    return [ok("addresses", "all private: none is of the open internet")]


LEAST = {"python": "3.10", "torch": "2.11", "numpy": "1.26"}
"""Oldest supported versions, as in pyproject.toml."""

EXTRAS = {
    "cli": (("typer", "rich", "sklearn", "psutil"), "the command line"),
    "bench": (("matplotlib", "seaborn"), "plots of `outergrad bench`"),
    "report": (("pandas", "plotly"), "reports of a run"),
    "tensorboard": (("tensorboard",), "runs in TensorBoard"),
}
"""Modules that each extra installs, and their purpose."""

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

_LEAST_FILES = 256
_LEAST_DISK_BYTES = 1_000_000_000


def look_at_machine(environment: Mapping[str, str], *, sites_here: int = 1) -> list[Finding]:
    """Checks this machine, on which `sites_here` sites run, in this process's environment."""
    folder = tempfile.gettempdir()
    found = versions()
    return [
        *(check_version(name, found[name]) for name in LEAST),
        check_gloo(dist.is_available() and dist.is_gloo_available()),
        check_gpus(*_gpus()),
        *check_extras(lambda module: find_spec(module) is not None),
        check_interface(taken_here(environment), socket.gethostname(), interfaces()),
        check_threads(environment, torch.get_num_threads(), cores(), sites_here),
        *check_variables(environment),
        check_open_files(_most_open_files()),
        check_disk(folder, shutil.disk_usage(folder).free),
        check_shaping(what_is_missing(ShapedLink(rate_bit_per_s=1e8), 2)),
    ]


def _gpus() -> tuple[list[str], str | None, str | None]:
    """Names of the devices, and the versions of torch's CUDA and of NCCL."""
    cuda, nccl = torch.version.cuda, None
    if not torch.cuda.is_available():
        return [], cuda, nccl
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())], cuda, nccl


def _most_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def check_version(name: str, version: str) -> Finding:
    """Checks that a version is new enough."""
    least, remedy = LEAST[name], f"pip install --upgrade '{name}>={LEAST[name]}'"
    if name == "python":
        remedy = f"install Python {least} or later"
    if _numbers(version) < _numbers(least):
        return problem(name, f"{version} is too old: {least} or later is needed", remedy)
    return ok(name, version)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def check_gloo(available: bool) -> Finding:
    """Checks that this build of torch has gloo."""
    if available:
        return ok("gloo", "available: this is what carries the exchange between sites")
    said = "this build of torch has no gloo, which carries the exchange between sites"
    return problem("gloo", said, "install torch from pytorch.org or with pip")


def check_gpus(names: Sequence[str], cuda: str | None, nccl: str | None) -> Finding:
    """Reports the GPUs that torch finds, with versions; none are needed."""
    if names:
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        carried = f"NCCL {nccl}" if nccl else "without NCCL"
        return ok("GPU", f"{counted}, CUDA {cuda}; {carried}")
    if cuda:
        said = f"torch is built for CUDA {cuda} but sees no GPU: training runs on the processor"
        return note("GPU", said, "if this machine has one, see whether `nvidia-smi` finds it")
    return ok("GPU", "none, and none needed: training runs on the processor")


def check_extras(has: Callable[[str], bool]) -> list[Finding]:
    """Reports which extras are installed; `has` tells if a module can be imported."""
    there = [name for name, (modules, _) in EXTRAS.items() if all(map(has, modules))]
    findings = [ok("extras", f"installed: {', '.join(there)}")] if there else []
    return findings + [
        note("extras", f"{name} is not installed: {use}", f"pip install 'outergrad[{name}]'")
        for name, (_, use) in EXTRAS.items()
        if name not in there
    ]


def check_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Reports environment variables that will surprise the user."""
    found = [
        level("variables", said.format(name=name, value=value), remedy.format(name=name))
        for name, (surprising, level, said, remedy) in VARIABLES.items()
        if (value := environment.get(name)) is not None
        and re.fullmatch(surprising, value, re.IGNORECASE | re.DOTALL)
    ]
    return found or [ok("variables", "no environment variable that is known to hurt")]


def check_threads(
    environment: Mapping[str, str], threads: int, cores: int, processes: int
) -> Finding:
    """Checks that PyTorch's threads fit the cores that the sites of this machine share."""
    wanted = max(1, cores // processes)
    said = f"{threads} for {many(cores, 'core')}"
    said += f" and {processes} sites on this machine" if processes > 1 else ""
    remedy = f"export OMP_NUM_THREADS={wanted}"
    if threads > wanted:
        return warning("threads", f"{said}: they will fight for them", remedy)
    if threads < wanted:
        why = " (torchrun sets OMP_NUM_THREADS=1)" if "TORCHELASTIC_RUN_ID" in environment else ""
        return note("threads", f"{said}: some stay idle{why}", remedy)
    return ok("threads", said)


def check_open_files(most: int | None) -> Finding:
    """Checks that a process may open enough sockets; None means no limit."""
    if most is not None and most < _LEAST_FILES:
        said = f"a process may open only {most}, sockets included"
        return warning("open files", said, "ulimit -n 1024")
    return ok("open files", "no limit" if most is None else f"up to {most:,}")


def check_disk(folder: str, free_bytes: int) -> Finding:
    """Checks that there is room for temporary files."""
    said = f"{amount(free_bytes)} free in {folder}"
    if free_bytes < _LEAST_DISK_BYTES:
        return warning("disk", said, "make room, or let TMPDIR name another folder")
    return ok("disk", said)


def check_shaping(missing: str | None) -> Finding:
    """Reports if `outergrad bench` can limit links here; `missing` says why not."""
    if missing is None:
        return ok("slow links", "`outergrad bench --link` can make them on this machine")
    return note("slow links", f"for `outergrad bench` alone: {missing}")
