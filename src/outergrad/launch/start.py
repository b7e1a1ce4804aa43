"""Starts the sites: as processes of this machine, or as torchrun has started them."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from outergrad.launch.elastic import fresh_store, shared_store
from outergrad.launch.errors import RecipeError, SiteError
from outergrad.launch.processes import error_text, run_processes
from outergrad.launch.traffic import stay_on_loopback

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
