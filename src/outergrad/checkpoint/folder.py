"""The files of checkpoints: names, whole or not at all, checked when read."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from outergrad._types import StateDict
from outergrad.checkpoint.tree import whole

_SAVE = re.compile(r"step-(\d+)-of-(\d+)-([0-9a-f]+)")
_SITE = re.compile(r"site-(\d+)\.pt")


class DamagedError(ValueError):
    """A file is not what it should be; names it."""


@dataclass(frozen=True, order=True)
class Save:
    """One checkpoint: a folder with a file per site.

    Attributes:
        step: that it was saved after.
        sites: how many files make it whole.
        id: tells it from another of the same step, of which it must not have a file.
    """

    step: int
    sites: int
    id: str

    def __str__(self) -> str:
        return f"step-{self.step:08}-of-{self.sites}-{self.id}"


def site_file(folder: Path, save: Save, number: int) -> Path:
    """Where a site's part of a checkpoint is."""
    return folder / str(save) / f"site-{number}.pt"


def shared_file(folder: Path, save: Save, first: int) -> Path:
    """Where the tensors are that the sites which share this folder have alike."""
    return folder / str(save) / f"shared-{first}.pt"


def saves_in(folder: Path) -> dict[Save, list[int]]:
    """The checkpoints of which there is something, and the sites whose files are there."""
    found: dict[Save, list[int]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _SAVE.fullmatch(path.name)
        if match and path.is_dir():
            names = (_SITE.fullmatch(file.name) for file in path.iterdir())
            step, sites, token = match.groups()
            save = Save(int(step), int(sites), token)
            found[save] = sorted(int(name[1]) for name in names if name)
    return found


def write(path: Path, value: Any) -> None:
    """Writes a file: it is there as a whole, also after a loss of power, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    write_with(path, lambda file: torch.save(value, file))


def write_with(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """The same of any content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with unfinished.open("wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    for folder in (path.parent, path.parent.parent):
        _sync(folder)


def _sync(folder: Path) -> None:
    """Makes names in a folder last, where the system lets one do that."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def read(path: Path) -> Any:
    """The content of a file, checked against its check sums.

    Raises:
        DamagedError: it is missing, cut short, changed, or no such file.
    """
    try:
        with zipfile.ZipFile(path) as file:
            bad = file.testzip() if torch.serialization.get_crc32_options() else None
        if bad is not None:
            raise ValueError(f"the check sum of {bad} is wrong")
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # zipfile and pickle raise nearly everything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedError(f"{path} cannot be read: {reason}") from error


def read_site(folder: Path, save: Save, number: int) -> StateDict:
    """What a site saved, with the tensors that it had in common with others in this folder.

    Raises:
        DamagedError: it cannot be read.
    """
    path = site_file(folder, save, number)
    found = read(path)
    try:
        first = found["shared"]
        shared = {} if first is None else read(shared_file(folder, save, first))
        return whole(found["state"], shared)
    except (KeyError, TypeError) as error:
        raise DamagedError(f"{path} is no part of a checkpoint: it lacks {error}") from error


def remove_before(folder: Path, kept: Collection[Save]) -> None:
    """Removes what is older than the oldest of the checkpoints to be kept, and between them.

    What is newer than all of them stays: it may be a later one that another program reads.

    Raises:
        OSError: something cannot be removed.
    """
    latest = max(kept)
    for save in saves_in(folder):
        if save.step <= latest.step and save not in kept:
            shutil.rmtree(folder / str(save))
