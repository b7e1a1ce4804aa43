"""Atomic writes: a file appears under its name as a whole, or not at all."""

from __future__ import annotations

import errno
import os
import pickle
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
"""Pattern of the class or function that a file asks for, in torch's error message."""

_BINARY = getattr(os, "O_BINARY", 0)
"""Flag of Windows, without which line ends would be translated."""


@contextmanager
def whole_file(path: Path, through_links: bool = True, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Opens a file that replaces `path` when the block ends without an error.

    Until then the content is in a hidden file beside it. An error removes the hidden file and
    leaves `path` as it was. After the block the content is on the disk (`fsync`). A pipe, a device
    or the process's own output, such as /dev/stdout, is written to directly. A link stays a link.

    Args:
        path: the file, in an existing folder.
        through_links: whether a link, a pipe or a device under that name is written through. False
            in a folder that others can write to: whatever they have put there is replaced.
        mode: permissions of the file, of which the process's umask takes some away.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    target = Path(os.path.realpath(path)) if through_links else _in_real_folder(path)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if through_links and _is_stream(path):
            with path.open("wb") as file:
                yield file
            return
        opened = os.open(str(unfinished), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode)
        with os.fdopen(opened, "wb") as file:
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


PRIVATE = 0o600
"""Mode of files that show data: their owner alone may read them."""


def write_whole(
    path: Path, content: str | bytes, through_links: bool = True, mode: int = 0o666
) -> None:
    """Writes text, as UTF-8, or bytes to a file atomically.

    Args:
        path: as for `whole_file`.
        content: of the file.
        through_links: as for `whole_file`.
        mode: as for `whole_file`.

    Raises:
        OSError: as `whole_file`.
    """
    with whole_file(path, through_links, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def save_whole(path: Path, value: Any, mode: int = 0o666) -> None:
    """Saves a value with `torch.save` atomically; a link under that name is replaced.

    Args:
        path: as for `whole_file`.
        value: what is saved.
        mode: as for `whole_file`.

    Raises:
        OSError: as `whole_file`; also where torch reports a full disk by a RuntimeError.
    """
    with whole_file(path, through_links=False, mode=mode) as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            cause = _os_error_in(error)
            if cause is None:
                raise
            raise cause from error


def load_plain(file: Path | IO[bytes]) -> Any:
    """Loads a file of `torch.save` that holds containers of tensors, numbers and text, on the CPU.

    Raises:
        OSError: the file cannot be opened, or is no ordinary file (a pipe could block for ever).
        ValueError: it cannot be read, or holds other types. The message leaves out torch's advice
            to load it all the same, which would run code from the file.
    """
    if isinstance(file, Path) and not file.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(file))
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise ValueError(told_of_pickle(str(error))) from None


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk; does nothing where the system has no such call."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _in_real_folder(path: Path) -> Path:
    return Path(os.path.realpath(path.parent)) / path.name


def told_of_pickle(told: str) -> str:
    """Returns torch's reason for not reading a file, without its advice to load it all the same.

    Args:
        told: message of torch's `UnpicklingError`.
    """
    usual, found = "tensors, numbers, text and containers of these", _GLOBAL.search(told)
    if found is None:
        return f"it is damaged, or holds something else than {usual}"
    return f"it holds {found.group(1)}, which is none of {usual}"


def _is_stream(path: Path) -> bool:
    """True if the path is a pipe, a device, or the file of this process's own output."""
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
    """Returns the error of the failed write, which is the context of torch's own error, or None."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is None and "inline_container" in str(error):
        cause = OSError(errno.EIO, " ".join(str(error).split()))
    return cause and OSError(cause.errno, cause.strerror)
