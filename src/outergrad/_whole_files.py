"""Files that appear under their names as a whole, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file that takes the place of `path` when the block ends without an error.

    Until then its content is in a hidden file beside it. An error removes that, and what was there
    before stays as it was. Afterwards the content has reached the disk (`fsync`). What is no
    ordinary file, as a pipe or /dev/stdout, is written to as it is; a link stays a link.

    Args:
        path: in a folder that is there.

    Raises:
        OSError: it cannot be written; names it.
    """
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if _is_stream(path):
            with path.open("wb") as file:
                yield file
            return
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(unfinished)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes text, as UTF-8, or bytes.

    Raises:
        OSError: as `whole_file`.
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save_whole(path: Path, value: Any) -> None:
    """Writes what `torch.save` makes of a value.

    Raises:
        OSError: as `whole_file`, also where torch tells of a full disk by a RuntimeError.
    """
    with whole_file(path) as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            cause = _os_error_in(error)
            if cause is None:
                raise
            raise cause from error


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last, where the system lets one do that."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe, a terminal, or what this process writes its own output to."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or _is_own_output(path.stat())


def _is_own_output(found: os.stat_result) -> bool:
    for number in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(number)):
                return True
    return False


def _os_error_in(error: BaseException) -> OSError | None:
    """The error of a write, on which torch's own error about the length of the file follows."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None and "inline_container" in str(error):
        cause = OSError(errno.EIO, " ".join(str(error).split()))
    return cause and OSError(cause.errno, cause.strerror)
