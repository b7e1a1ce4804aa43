"""Checks of `og.LocalSteps(quorum=...)` against transport and settings: a problem and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outergrad.core.transport import Comm
from outergrad.methods.local_steps import LocalSteps


def refuse_quorum(method: Any, comm: Comm, **settings: Any) -> None:
    """Checks that exchanges can go ahead with a quorum.

    Args:
        method: of any kind.
        comm: the transport.
        **settings: those of the user that every exchange would need all sites for, by name.

    Raises:
        ValueError: they cannot.
    """
    if not isinstance(method, LocalSteps) or method.quorum is None:
        return
    first = next(_problems(method, comm, settings), None)
    if first is not None:
        raise ValueError(f"LocalSteps(quorum={method.quorum}) {first}")


def _problems(method: LocalSteps, comm: Comm, settings: dict[str, Any]) -> Iterator[str]:
    if method.least(comm.world_size) > comm.world_size:
        yield f"asks for more sites than there are: {comm.world_size}; use that or less"
    if comm.mesh is not None:
        yield "with mesh=: the ranks of a site would have to be late together; leave quorum out"
    if comm.board is None and comm.world_size > 1:
        yield (
            f"needs a board, on which sites write who takes part, and the transport "
            f"{type(comm).__name__} has none here; use gloo or og.Star, or leave quorum out"
        )
    for name in [name for name, value in settings.items() if value is not None]:
        yield (
            f"with {name}={settings[name]!r}: an exchange without a late site is no step, and does "
            f"not go by it; leave one of them out"
        )
