"""Which sites see the same folder."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from outergrad._protocols import Comm
from outergrad.checkpoint.folder import write_with
from outergrad.checkpoint.talk import gathered
from outergrad.comm.agree import agree


def first_of_folder(
    comm: Comm, folder: Path, lines: list[str], error: Exception | None
) -> list[int]:
    """Of every site the first one that shares its folder, itself if it has one of its own.

    Each leaves a file there and looks for those of the others.

    Args:
        comm: the transport.
        folder: of this site; made if there is none.
        lines: what the sites must have in common besides.
        error: what is wrong on this site already, if anything.

    Raises:
        OSError: this site cannot write there.
        ValueError: another one cannot, or they differ.
    """
    mark = folder / f".here-{comm.rank}-{secrets.token_hex(4)}"
    try:
        write_with(mark, lambda file: None)
    except OSError as raised:
        error = error or raised
    try:
        agree(comm, lines, error, "name the same parts for every site")
        marks = gathered(comm, mark.name)
        seen = [rank for rank, name in enumerate(marks) if (folder / name).exists()]
        return gathered(comm, min([*seen, comm.rank]))
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
