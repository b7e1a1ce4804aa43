"""Detection of sites that share a folder."""

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
    """Returns, by rank, the lowest rank that shares each site's folder; its own if none does.

    Each site leaves a file in its folder and looks for the files of the others.

    Args:
        comm: the transport.
        folder: folder of this site; created if missing.
        lines: further description that the sites must have in common.
        error: error of this site so far, if any.

    Raises:
        OSError: this site cannot write there.
        ValueError: another site cannot write, the descriptions differ, or a site names a file
            elsewhere.
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
