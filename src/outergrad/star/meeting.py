"""The meeting of a star's sites: they wait for each other, and exchange texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outergrad.star.line import Line


def wait_until_ready(line: Line, wait_s: float) -> None:
    """Waits until all sites are connected, or the sites that train admit this one.

    Raises:
        RuntimeError: some have not come in time, or the hub cannot be reached.
    """
    if line.wait_for(lambda: line.is_ready or line.invitation is not None, wait_s):
        return
    if line.failure is not None:
        raise RuntimeError(str(line.failure)) from line.failure
    raise RuntimeError(
        f"not all of the sites {', '.join(line.names)} came within {wait_s:g} s"
        if line.names
        else f"the hub did not answer within {wait_s:g} s"
    )


def exchange_texts(
    line: Line, name: str, text: str, wait_s: float, *, of_gone: bool = True
) -> dict[int, str]:
    """Leaves a text for all other sites; returns those that they leave under its name, by rank.

    Args:
        line: of this process.
        name: of the texts, the same on all sites.
        text: of this site.
        wait_s: timeout, seconds.
        of_gone: whether it is an error if a site is gone without a text.

    Raises:
        RuntimeError: a text has not come.
    """
    line.leave_text(name, text)
    others = [rank for rank in range(len(line.names)) if rank != line.rank]

    def missing() -> set[int]:
        return {rank for rank in others if (rank, name) not in line.texts}

    def is_over() -> bool:
        late = missing()
        return late <= line.gone.keys() or (of_gone and bool(late & line.gone.keys()))

    line.wait_for(is_over, wait_s)
    late = missing()
    if late and (of_gone or not late <= line.gone.keys()):
        names = ", ".join(line.names[rank] for rank in sorted(late & line.gone.keys() or late))
        raise RuntimeError(f"no word of {names} within {wait_s:g} s, or before they went")
    return {rank: line.texts[rank, name] for rank in others if rank not in late}
