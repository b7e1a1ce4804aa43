"""The files of checkpoints: names, whole or not at all, checked when read."""

from __future__ import annotations

import errno
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch

from outergrad._whole_files import load_plain, save_whole, sync_folder, write_whole
from outergrad.checkpoint.tree import whole
from outergrad.core.types import StateDict

_SAVE = re.compile(r"step-([0-9]{8,18})-of-([1-9][0-9]{0,5})-([0-9a-f]{6})")
_SITE = re.compile(r"site-(0|[1-9][0-9]{0,17})\.pt")
_UNFINISHED = "unfinished"
"""A file that stands in the folder of a checkpoint until all sites have written theirs."""

_PARTS = ("rank", "session", "parts", "own", "random")
"""What a site saves."""


class DamagedError(ValueError):
    """A file is not what it should be; names it."""


@dataclass(frozen=True, order=True)
class Save:
    """One checkpoint: a folder with a file per site.

    Attributes:
        step: that it was saved after.
        sites: how many files make it whole.
        id: six hexadecimal digits that tell it from another of the same step, of which it must
            not have a file.
    """

    step: int
    sites: int
    id: str

    def __post_init__(self) -> None:
        """Checks that it names a folder, and none elsewhere.

        Raises:
            ValueError: it does not.
        """
        if not _SAVE.fullmatch(str(self)):
            raise ValueError(f"{str(self)!r} is no name of a checkpoint")

    def __str__(self) -> str:
        return f"step-{self.step:08}-of-{self.sites}-{self.id}"


@dataclass(frozen=True)
class Seen:
    """What a site sees of a checkpoint.

    Attributes:
        files: numbers of the sites whose files are there.
        unfinished: whether it has not been written to its end everywhere.
        problem: why its folder cannot be looked into; empty if it can.
    """

    files: tuple[int, ...] = ()
    unfinished: bool = False
    problem: str = ""


Listing = Mapping[Save, Seen]
"""What a site sees in its folder."""


def site_file(folder: Path, save: Save, number: int) -> Path:
    """Where a site's part of a checkpoint is."""
    return folder / str(save) / f"site-{number}.pt"


def shared_file(folder: Path, save: Save, first: int) -> Path:
    """Where the tensors are that the sites which share this folder have alike."""
    return folder / str(save) / f"shared-{first}.pt"


def saves_in(folder: Path) -> dict[Save, Seen]:
    """The checkpoints of which there is something; none where there is no folder.

    Raises:
        OSError: the folder cannot be looked into.
    """
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return {}
    named = ((path, _SAVE.fullmatch(path.name)) for path in paths)
    found = {Save(int(m[1]), int(m[2]), m[3]): path for path, m in named if m}
    return {save: _seen(path) for save, path in found.items() if path.name == str(save)}


def _seen(path: Path) -> Seen:
    try:
        names = [file.name for file in path.iterdir()]
    except OSError as error:
        return Seen(problem=f"{path} cannot be looked into: {error.strerror}")
    numbers = sorted(int(match[1]) for name in names if (match := _SITE.fullmatch(name)))
    return Seen(tuple(numbers), _UNFINISHED in names)


def begin(folder: Path, save: Save) -> None:
    """Makes the folder of a checkpoint, marked as unfinished: nothing in it counts as lost.

    Raises:
        OSError: it cannot be made.
    """
    path = folder / str(save)
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, not a folder", str(path))
    write_whole(path / _UNFINISHED, b"", through_links=False)
    for changed in (path, folder):
        sync_folder(changed)


def finish(folder: Path, save: Save) -> None:
    """All sites have written theirs.

    Raises:
        OSError: the mark cannot be removed.
    """
    (folder / str(save) / _UNFINISHED).unlink(missing_ok=True)


def take_back(folder: Path, save: Save, number: int, rank: int) -> None:
    """Removes what a site has written of a checkpoint that another could not write.

    The last of the sites that share the folder removes it.
    """
    own = [site_file(folder, save, number), shared_file(folder, save, rank)]
    for path in own:
        with suppress(OSError):
            path.unlink()
    path = folder / str(save)
    with suppress(OSError):
        if not any(file.name != _UNFINISHED for file in path.iterdir()):
            shutil.rmtree(path)


def remove(folder: Path, save: Save) -> None:
    """Removes a checkpoint.

    Raises:
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / str(save))


def write(path: Path, value: Any) -> None:
    """Writes a file: it is there as a whole, also after a loss of power, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, value)


def read(path: Path) -> Any:
    """The content of a file, checked against its check sums.

    Raises:
        DamagedError: it is missing, cut short, changed, or no such file.
    """
    with _checked(path):
        return load_plain(path)


def check(folder: Path, save: Save) -> None:
    """Reads every file of a checkpoint in a folder, without taking it into memory.

    Raises:
        DamagedError: one cannot be read.
    """
    for path in sorted((folder / str(save)).glob("*.pt")):
        with _checked(path):
            pass


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Compares check sums first; names the file in the error if these or the block fail."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        with zipfile.ZipFile(path) as file:
            bad = file.testzip() if torch.serialization.get_crc32_options() else None
        if bad is not None:
            raise ValueError(f"the check sum of {bad} is wrong")
        yield
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
        shared = {} if first is None else read(shared_file(folder, save, index(first)))
        state = whole(found["state"], shared)
        return {name: state[name] for name in _PARTS} | {"rank": index(state["rank"])}
    except (KeyError, TypeError) as error:
        raise DamagedError(f"{path} is no part of a checkpoint: it lacks {error}") from error
