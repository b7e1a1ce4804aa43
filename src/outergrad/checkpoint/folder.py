"""Files of checkpoints: their names, atomic writes, and checks when they are read."""

from __future__ import annotations

import copy
import errno
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outergrad._whole_files import load_plain, save_whole, sync_folder, write_whole
from outergrad.core.types import StateDict
from outergrad.messages.raw import digest

_ELSEWHERE = "outergrad: tensor elsewhere"
"""Key of the mark that replaces a tensor which is stored in another file."""


def tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Returns every dense, real tensor in a tree of dicts, lists and tuples, with its path."""
    found: list[tuple[str, Tensor]] = []

    def note(leaf: Any, place: str) -> None:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_complex():
            found.append((place, leaf))

    _mapped(tree, note)
    return found


def digests(tree: Any) -> dict[int, str]:
    """Returns the path of every tensor, by a digest of its path, shape, dtype and content."""
    forms = ((f"{place}: {tuple(t.shape)} {t.dtype}", place, t) for place, t in tensors(tree))
    return {digest(form.encode(), [t]): place for form, place, t in forms}


def without(tree: Any, elsewhere: Collection[str]) -> Any:
    """Returns the tree with marks in place of the tensors at some paths."""
    return _mapped(tree, lambda leaf, at: {_ELSEWHERE: at} if at in elsewhere else leaf)


def whole(tree: Any, elsewhere: Mapping[str, Tensor]) -> Any:
    """Returns the tree with the tensors in place of its marks.

    Raises:
        KeyError: a tensor is missing.
    """
    return _mapped(tree, lambda leaf, _: elsewhere[leaf[_ELSEWHERE]] if _marks(leaf) else leaf)


def _mapped(tree: Any, change: Callable[[Any, str], Any], place: str = "") -> Any:
    """Returns the tree with each leaf replaced by `change(leaf, path)`."""
    if isinstance(tree, dict) and not _marks(tree):
        new = copy.copy(tree)  # keeps `_metadata`, a model's versions
        new.update({k: _mapped(item, change, f"{place}/{k!r}") for k, item in tree.items()})
        return new
    if type(tree) in (list, tuple):
        items = enumerate(tree)
        return type(tree)([_mapped(item, change, f"{place}/{k!r}") for k, item in items])
    return change(tree, place)


def _marks(tree: Any) -> bool:
    return isinstance(tree, dict) and _ELSEWHERE in tree


_SAVE = re.compile(r"step-([0-9]{8,18})-of-([1-9][0-9]{0,5})-([0-9a-f]{6})")
_SITE = re.compile(r"site-(0|[1-9][0-9]{0,17})\.pt")
_UNFINISHED = "unfinished"
"""Mark in the folder of a checkpoint until all sites have written their files."""

_PARTS = ("rank", "session", "parts", "own", "random")
"""Keys of a site's state."""


class DamagedError(ValueError):
    """A file is damaged, missing, or of another kind; the error names it."""


@dataclass(frozen=True, order=True)
class Save:
    """Name of one checkpoint: a folder with a file per site.

    Attributes:
        step: number of completed steps when it was saved.
        sites: number of files that make it complete.
        id: six hexadecimal digits that tell it from another checkpoint of the same step, so that
            their files do not mix.
    """

    step: int
    sites: int
    id: str

    def __post_init__(self) -> None:
        """Checks that the text names a checkpoint's folder, and no path elsewhere.

        Raises:
            ValueError: it does not.
        """
        if not _SAVE.fullmatch(str(self)):
            raise ValueError(f"{str(self)!r} is no name of a checkpoint")

    def __str__(self) -> str:
        return f"step-{self.step:08}-of-{self.sites}-{self.id}"


@dataclass(frozen=True)
class Seen:
    """A checkpoint as one site sees it.

    Attributes:
        files: numbers of the sites whose files are there.
        unfinished: whether the mark of an unfinished checkpoint is there.
        problem: why its folder cannot be looked into; empty if it can.
    """

    files: tuple[int, ...] = ()
    unfinished: bool = False
    problem: str = ""


Listing = Mapping[Save, Seen]
"""Checkpoints that a site sees in its folder."""


def site_file(folder: Path, save: Save, number: int) -> Path:
    """Returns the path of a site's own part of a checkpoint."""
    return folder / str(save) / f"site-{number}.pt"


def shared_file(folder: Path, save: Save, first: int) -> Path:
    """Returns the path of the tensors that are identical on all sites of this folder."""
    return folder / str(save) / f"shared-{first}.pt"


def saves_in(folder: Path) -> dict[Save, Seen]:
    """Returns the checkpoints, complete or not, in a folder; none where there is no folder.

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
    """Makes the folder of a checkpoint, marked as unfinished: no missing file counts as lost.

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
    """Removes the mark of a checkpoint of which all sites have written their files.

    Raises:
        OSError: the mark cannot be removed.
    """
    (folder / str(save) / _UNFINISHED).unlink(missing_ok=True)


def take_back(folder: Path, save: Save, number: int, rank: int) -> None:
    """Removes this site's files of a checkpoint that another site could not write.

    The last of the sites that share the folder removes the folder.
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
    """Removes a checkpoint, if it is there.

    Raises:
        OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(folder / str(save))


def write(path: Path, value: Any) -> None:
    """Writes a file atomically: even after a loss of power it is there as a whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, value)


def read(path: Path) -> Any:
    """Returns the content of a file, after its check sums were compared.

    Raises:
        DamagedError: the file is missing, cut short, changed, or of another kind.
    """
    with _checked(path):
        return load_plain(path)


def check(folder: Path, save: Save) -> None:
    """Compares the check sums of every file of a checkpoint, without loading it into memory.

    Raises:
        DamagedError: a file cannot be read.
    """
    for path in sorted((folder / str(save)).glob("*.pt")):
        with _checked(path):
            pass


@contextmanager
def _checked(path: Path) -> Iterator[None]:
    """Compares check sums before the block; names the file in the error if either fails."""
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
    """Returns the state that a site saved, with the tensors that it shares with others.

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
