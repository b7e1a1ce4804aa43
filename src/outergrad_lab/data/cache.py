"""Keeps on disk what takes long to make of the files of a data set."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from outergrad._whole_files import whole_file

Arrays = Mapping[str, np.ndarray]


def cached(name: str, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Arrays from the cache folder; made, and put there if that is possible, where they are not.

    The folder is ``OUTERGRAD_CACHE``, or ``~/.cache/outergrad``.

    Args:
        name: What they are called, for a person who looks into the folder.
        key: What they are made from, as `key_of` gives it.
        make: Makes them.
    """
    try:
        path = _folder() / f"{name}-{key[:16]}.npz"
    except RuntimeError:  # there is no home
        return make()
    found = _read(path, key)
    if found is None:
        found = make()
        with suppress(OSError):  # a folder that cannot be written to only costs time
            _write(path, {**found, "key": np.array(key)})
    return found


def key_of(settings: Iterable[object], files: Iterable[Path]) -> str:
    """A hash of settings and of what files contain."""
    digest = hashlib.sha256(repr(tuple(settings)).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _folder() -> Path:
    return Path(os.environ.get("OUTERGRAD_CACHE") or Path.home() / ".cache" / "outergrad")


def _read(path: Path, key: str) -> Arrays | None:
    """What is there, unless it is damaged or something else."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = dict(arrays)
        return found if found.pop("key") == key else None
    except Exception:  # zipfile and NumPy raise nearly everything
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Writes a file that appears under its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
