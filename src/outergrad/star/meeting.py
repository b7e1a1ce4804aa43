"""How the sites of a star meet: all are there, and tell each other what each has to know first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outergrad.star.line import Line


def wait_until_ready(line: Line, wait_s: float) -> None:
    """Until all sites are there, or those that train take this one in.

    Raises:
        RuntimeError: they have not come, or the hub cannot be reached.
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
    """Those that all other sites leave under the same name, by rank.

    Args:
        line: of this process.
        name: of the texts.
        text: this site's.
        wait_s: how long to wait.
        of_gone: whether it is an error if a site is gone that has left none.

    Raises:
        RuntimeError: they do not.
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
