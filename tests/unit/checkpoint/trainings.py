"""Two sites that train, save and go on, and what is in their folders."""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from outergrad.checkpoint import Restored
from ranks import run_on_lasting_groups, try_ranks
from sites_that_save import METHODS, Site

METHOD = METHODS["rank-dad"]


def saved_after(steps: Iterable[int], folder_of, *, restore: bool = False, sites: int = 2) -> None:
    """Trains and saves after these steps, going on from what there is if that is wanted."""

    def body(rank, group):
        site = Site(METHOD, rank, group, folder_of(rank))
        found = site.checkpoints.restore() if restore else None
        for step in range(found.step if found else 0, max(steps)):
            site.step(step)
            if step + 1 in steps:
                site.checkpoints.save(step + 1)

    run_on_lasting_groups(sites, body)


def restored(folder_of, sites: int = 2, **options: Any) -> list[Restored | None]:
    """What every site finds."""

    def body(rank, group):
        return Site(METHOD, rank, group, folder_of(rank)).checkpoints.restore(**options)

    return run_on_lasting_groups(sites, body)


def refused(folder_of, sites: int = 2, **options: Any) -> list[str]:
    """What every site says where none goes on, and changes nothing."""

    def body(rank, group):
        Site(METHOD, rank, group, folder_of(rank)).checkpoints.restore(**options)

    folders = {folder_of(rank) for rank in range(sites)}
    before = [content(folder) for folder in folders]
    errors = try_ranks(sites, body)
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert [content(folder) for folder in folders] == before
    return [str(error) for error in errors]


def content(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below a folder."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {str(p): str(p.readlink()) if p.is_symlink() else p.read_bytes() for p in paths}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Changes a number in the middle of the largest tensor: between two there is only padding."""
    with zipfile.ZipFile(path) as file:
        largest = max(file.infolist(), key=lambda part: part.file_size)
    changed = bytearray(path.read_bytes())
    header = largest.header_offset
    name_and_more = sum(struct.unpack_from("<HH", changed, header + 26))
    changed[header + 30 + name_and_more + largest.file_size // 2] ^= 1
    path.write_bytes(changed)


def dead_link(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to("/nowhere/at/all")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "changed": flip,
    "emptied": lambda path: path.write_bytes(b""),
    "dead link": dead_link,
}
