"""Cache on disk for arrays of data sets that take long to compute."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from outergrad._whole_files import whole_file

Arrays = Mapping[str, np.ndarray]


def cached(name: str, key: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns arrays from the cache folder; if they are missing, makes and stores them.

    Nothing is stored where the folder cannot be written to. The folder is ``OUTERGRAD_CACHE``, or
    ``~/.cache/outergrad``.

    Args:
        name: Name of the arrays, for a person who looks into the folder.
        key: Key of what they are made from, as `key_of` gives it.
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
    """Returns a hash of settings and of the contents of files."""
    digest = hashlib.sha256(repr(tuple(settings)).encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _folder() -> Path:
    return Path(os.environ.get("OUTERGRAD_CACHE") or Path.home() / ".cache" / "outergrad")


def _read(path: Path, key: str) -> Arrays | None:
    """Reads the arrays of a file; None if it is missing, damaged or of another key."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = dict(arrays)
        return found if found.pop("key") == key else None
    except Exception:  # zipfile and NumPy raise nearly everything
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
