"""What this machine is like: gathers the facts and has them checked."""

from __future__ import annotations

import platform
import shutil
import socket
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.distributed as dist

import outergrad
from outergrad.launch.links import Link, what_is_missing
from outergrad.launch.machine import cores
from outergrad.tools.doctor.environment import (
    check_disk,
    check_open_files,
    check_shaping,
    check_threads,
    check_variables,
)
from outergrad.tools.doctor.findings import Finding
from outergrad.tools.doctor.interface import Taken, check_interface, interfaces, taken_by_gloo
from outergrad.tools.doctor.rendezvous import Meeting
from outergrad.tools.doctor.sites import Site
from outergrad.tools.doctor.software import check_extras, check_gloo, check_gpus, check_version


def look_at_machine(environment: Mapping[str, str], *, sites_here: int = 1) -> list[Finding]:
    """Checks this machine.

    Args:
        environment: Of this process.
        sites_here: How many sites share the machine.
    """
    return [
        *look_at_software(),
        check_interface(taken_here(environment), socket.gethostname(), interfaces()),
        check_threads(environment, torch.get_num_threads(), cores(), sites_here),
        *check_variables(environment),
        check_open_files(_most_open_files()),
        check_disk(tempfile.gettempdir(), shutil.disk_usage(tempfile.gettempdir()).free),
        check_shaping(what_is_missing(Link(rate_bit_per_s=1e8), 2)),
    ]


def look_at_software() -> list[Finding]:
    """Checks what is installed."""
    found = versions()
    return [
        *(check_version(name, found[name]) for name in ("python", "torch", "numpy")),
        check_gloo(dist.is_available() and dist.is_gloo_available()),
        check_gpus(_gpus(), torch.version.cuda, _nccl()),
        *check_extras(lambda module: find_spec(module) is not None),
    ]


def taken_here(environment: Mapping[str, str]) -> Taken:
    """The address that gloo will take on this machine."""
    return taken_by_gloo(environment, socket.gethostname(), interfaces())


def versions() -> dict[str, str | None]:
    """What is installed, by name."""
    return {
        "outergrad": outergrad.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": _installed("numpy"),
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _nccl() -> str | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]


def _most_open_files() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if most == resource.RLIM_INFINITY else most


def describe(meeting: Meeting, taken: Taken, port: int, findings: list[Finding]) -> Site:
    """This site, as the others will know it.

    Args:
        meeting: Where it stands among them.
        taken: The address that gloo takes.
        port: On which this site listens.
        findings: What it found about its machine.
    """
    return Site(
        rank=meeting.rank,
        sites=meeting.sites,
        host=socket.gethostname(),
        interface=taken.interface or "?",
        address=taken.address or "127.0.0.1",
        port=port,
        versions={name: version or "none" for name, version in versions().items()},
        findings=findings,
    )
