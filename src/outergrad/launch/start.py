"""Starts the sites: as processes of this machine, or as torchrun has started them."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError  # pyright: ignore[reportPrivateImportUsage]

from outergrad.core.addresses import Address
from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.processes import error_text, run_processes
from outergrad.launch.traffic import stay_on_loopback

_POLL_S = 0.02
_SERVED = "TORCHELASTIC_USE_AGENT_STORE"


def master_host(environment: Mapping[str, str]) -> str:
    """Returns the host that MASTER_ADDR names.

    Raises:
        RecipeError: It stands in brackets, which PyTorch takes for a part of a name.
    """
    host = environment["MASTER_ADDR"]
    if host.startswith("["):
        raise RecipeError(
            f"MASTER_ADDR={host} has brackets, which PyTorch takes for a part of a name: set it to "
            f"{host.strip('[]')}"
        )
    return host


def shared_store(environment: Mapping[str, str], timeout: timedelta) -> Store:
    """Returns the store of torchrun's agent, or the one of site 0 if the agent has none.

    Raises:
        RecipeError: The environment lacks the store's address, its port is taken, or nobody
            answers.
    """
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        raise RecipeError("RANK is set but MASTER_ADDR or MASTER_PORT is not: set them to site 0's")
    address = Address(master_host(environment), int(environment["MASTER_PORT"]))
    holds = environment["RANK"] == "0" and environment.get(_SERVED) != "True"
    try:
        return TCPStore(*address, int(environment["WORLD_SIZE"]), holds, timeout)
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise RecipeError(
                f"port {address.port} is taken by another program: choose another MASTER_PORT, the "
                f"same at every site"
            ) from None
        raise RecipeError(
            f"site {environment['RANK']} does not reach site 0 at {address}: start it, and "
            f"let `outergrad doctor` look at what is between them"
        ) from None


def fresh_store(store: Store, rank: int, sites: int, timeout: timedelta) -> Store:
    """Returns a prefix of a store in which an earlier start of the same sites has left nothing.

    All starts share one store since PyTorch 2.5 (pytorch/pytorch#135712), so that gloo may take
    the addresses of sites that have ended. How often each machine has restarted its sites need
    not be the same on all of them. Site 0 therefore draws a name for this start and gives it to
    the other sites. Each of them recognises by a random token of its own that the name is meant
    for this start.

    Args:
        store: Shared by all sites and all starts.
        rank: Rank of this site.
        sites: Number of sites.
        timeout: How long to wait for the other sites.

    Raises:
        TimeoutError: The other sites have not come.
    """
    end = time.monotonic() + timeout.total_seconds()
    name = _give(store, sites, end) if rank == 0 else _take(store, rank, end)
    return PrefixStore(f"outergrad/{name}", store)


def _give(store: Store, sites: int, end: float) -> str:
    name, missing = secrets.token_hex(8), set(range(1, sites))
    while missing:
        for rank in missing:
            if store.check([_key("asks", rank)]):
                store.set(_key("told", rank), store.get(_key("asks", rank)).decode() + name)
        missing = {rank for rank in missing if _read(store, _key("took", rank)) != name}
        _pause(end, f"site 0 has waited for sites {sorted(missing)}")
    return name


def _take(store: Store, rank: int, end: float) -> str:
    own = secrets.token_hex(8)
    store.set(_key("asks", rank), own)
    while not (told := _read(store, _key("told", rank))).startswith(own):
        _pause(end, f"site {rank} has waited for site 0")
    name = told.removeprefix(own)
    store.set(_key("took", rank), name)
    return name


def _key(word: str, rank: int) -> str:
    return f"outergrad/{word}/{rank}"


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _pause(end: float, waits: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(f"{waits} in vain")
    time.sleep(_POLL_S)


T = TypeVar("T")

TIMEOUT = timedelta(minutes=2)


def under_torchrun() -> bool:
    """True if torchrun, or a launcher like it, has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def number_of_sites(wanted: int | None, default: int = 2) -> int:
    """Returns the number of sites.

    Args:
        wanted: Number that the user asked for, if any.
        default: Number where neither the user nor torchrun gave one.

    Raises:
        RecipeError: torchrun has started another number than the user asked for.
    """
    if not under_torchrun():
        return wanted or default
    started = int(os.environ["WORLD_SIZE"])
    if wanted not in (None, started):
        raise RecipeError(
            f"--sites {wanted}, but torchrun started {started}: leave out --sites "
            f"or start torchrun with --nproc-per-node {wanted}"
        )
    return started


def run_sites(work: Callable[[], object], sites: int, *, verbose: bool = False) -> None:
    """Runs work at every site, as a member of one process group.

    Args:
        work: Work of a site; picklable, since other processes run it.
        sites: Number of processes to start, unless torchrun has started them.
        verbose: Whether a failure includes its traceback.

    Raises:
        RecipeError: The user made a mistake.
        SiteError: A site failed; the processes that this one started have been ended.
    """
    if under_torchrun():
        _join_torchrun(work, verbose=verbose)
    else:
        start_sites(work, range(sites), verbose=verbose)


def _join_torchrun(work: Callable[[], object], *, verbose: bool) -> None:
    rank, sites = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = fresh_store(shared_store(os.environ, TIMEOUT), rank, sites, TIMEOUT)
        _in_group(work, store=store, rank=rank, world_size=sites)
    except RecipeError:
        raise
    except Exception as error:
        raise SiteError(f"site {rank}: {error_text(error, verbose)}") from error


def start_sites(work: Callable[[], T], numbers: Sequence[int], *, verbose: bool = False) -> list[T]:
    """Runs work at local sites: new processes, which meet in a store of their own.

    Args:
        work: Work of a site; picklable.
        numbers: Numbers of the sites, in the order of their ranks.
        verbose: Whether a failure includes its traceback.

    Raises:
        RecipeError: The user made a mistake.
        SiteError: A site failed; the others have been ended.
    """
    with tempfile.TemporaryDirectory(prefix="outergrad-") as folder:
        store, sites = (Path(folder) / "store").as_uri(), len(numbers)
        works = [partial(_local_site, work, store, rank, sites) for rank in range(sites)]
        return run_processes(works, verbose=verbose, numbers=numbers)


def _local_site(work: Callable[[], T], store: str, site: int, sites: int) -> T:
    stay_on_loopback()
    torch.set_num_threads(max(1, torch.get_num_threads() // sites))
    return _in_group(work, init_method=store, rank=site, world_size=sites)


def _in_group(work: Callable[[], T], **group: Any) -> T:
    dist.init_process_group("gloo", timeout=TIMEOUT, **group)
    result = work()
    dist.destroy_process_group()
    return result
