"""Which sites see the same folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from outergrad._whole_files import write_whole
from outergrad.checkpoint import claims
from outergrad.checkpoint.messaging import gathered
from outergrad.comm.agree import agree
from outergrad.core.transport import Comm


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
        ValueError: another one cannot, they differ, or one names a file elsewhere.
    """
    mark = folder / f".here-{comm.rank}-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(mark, b"", through_links=False)
    except OSError as raised:
        error = error or raised
    try:
        agree(comm, lines, error, "name the same parts for every site")
        marks = claims.understood(gathered(comm, mark.name), claims.mark, "its folder")
        seen = [rank for rank, name in enumerate(marks) if os.path.exists(folder / name)]
        firsts = gathered(comm, min([*seen, comm.rank]))
        return claims.understood(firsts, claims.number, "its folder")
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()
