"""Checks of `og.Gossip` against transport and settings: a problem and a remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from outergrad.core.transport import Comm

if TYPE_CHECKING:
    from outergrad.gossip.settings import Gossip


def is_gossip(method: Any) -> TypeGuard[Gossip]:
    """True for `og.Gossip`; loads none of its files for a session of another method."""
    home = sys.modules.get("outergrad.gossip.settings")
    return home is not None and isinstance(method, home.Gossip)


def refuse_gossip(method: Any, comm: Comm, **settings: Any) -> None:
    """Checks whether sites can gossip here.

    Args:
        method: the user's; nothing is checked unless it is `og.Gossip`.
        comm: the transport.
        **settings: arguments of `distribute`.

    Raises:
        ValueError: they cannot; names why, and the remedy.
    """
    if not is_gossip(method):
        return
    from outergrad.gossip.agreeing import refuse_parting
    from outergrad.gossip.graphs import refuse_disconnected

    refuse_disconnected(method.way, comm.world_size)
    refuse_parting(method, comm.world_size)
    first = next(_problems(comm, settings), None)
    if first is not None:
        raise ValueError(f"og.Gossip {first}")


def _problems(comm: Comm, settings: dict[str, Any]) -> Iterator[str]:
    if settings["mesh"] is not None:
        yield "is for sites of one rank: leave mesh= out"
    if comm.world_size > 1 and not comm.has_lines:
        yield (
            f"needs lines between pairs of sites, which the transport {type(comm).__name__} does "
            f"not have: use a process group with gloo, as init_process_group('gloo'), or og.Star"
        )
    if comm.min_sites is not None:
        yield "goes on without a lost site by itself: leave when_lost='go on' of og.Star out"
    if settings["transform"] is not None:
        yield "sends weights, and transform= changes gradients before they travel: leave it out"
    if settings["tap"] is not None:
        yield "sends letters of weights, of which no tap is told: leave tap= out"
    if settings["max_bad_steps"] is not None:
        yield "has no step that all sites could skip: leave max_bad_steps= out"
    if settings["weighting"] != "sites":
        yield f"counts all sites alike: leave weighting={settings['weighting']!r} out"
    if settings["buffers"] not in (None, "local"):
        yield f"leaves buffers to each site: leave buffers={settings['buffers']!r} out"
    if settings["verify_every"] is not None:
        yield "lets sites differ all the time: leave verify_every= out"
