"""Checks that a transport can do what a method needs, and its description for the sites."""

from __future__ import annotations

from collections.abc import Set

from outergrad.core.model import Compressors
from outergrad.core.transport import Capability, Comm
from outergrad.core.types import Route

_REMEDIES = {
    Capability.ALL_REDUCE: "what travels dense is summed by it; use another transport",
    Capability.ALL_TO_ALL: "use reduce='gather' or reduce='all_reduce', or another transport",
}


def refuse_incapable(method: str, compressors: Compressors, comm: Comm) -> None:
    """Raises if a transport lacks all-reduce (all may travel dense) or what a method needs.

    Args:
        method: as text.
        compressors: of the method.
        comm: the transport.

    Raises:
        ValueError: names what the transport lacks, the method and the remedy.
    """
    needs = {Capability.ALL_REDUCE}.union(
        *(compressor.needs for compressor, _ in compressors.items())
    )
    refuse_lacking(f"method={method}", needs, comm)


def refuse_lacking(what: str, needs: Set[Capability], comm: Comm) -> None:
    """Raises ValueError, with the remedy, if a transport lacks one of the capabilities."""
    for lacking in [one for one in Capability if one in needs - comm.capabilities]:
        raise ValueError(
            f"{what} needs {lacking.value}, which the transport {type(comm).__name__} cannot do: "
            f"{_REMEDIES[lacking]}"
        )


def transport_lines(comm: Comm) -> list[str]:
    """Returns lines about the transport, from which plans follow, for the sites to compare."""
    shares = ", ".join(f"{way.value} {comm.cost.share(1, way):.6g}" for way in Route)
    able = ", ".join(one.value for one in Capability if one in comm.capabilities)
    goes_on = [] if comm.min_sites is None else [f"goes on from {comm.min_sites} sites on"]
    cost = f"cost of a byte: {shares}, sent {comm.cost.copies} times"
    return [cost, f"transport can: {able}", *goes_on]
