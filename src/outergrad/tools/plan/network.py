"""Network of a plan: costs of its collectives, and rates of its lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from outergrad.comm.cost import Collective, RingCost, StarCost
from outergrad.core.cost import CostModel
from outergrad.launch.errors import RecipeError
from outergrad.launch.links import ShapedLink
from outergrad.tools.plan.imported import imported

GLOO_BYTES = {
    Collective.ALL_GATHER: 144,
    Collective.ALL_TO_ALL: 144,
    Collective.ALL_REDUCE: 288,
}
"""Bytes of gloo's own protocol per message and hop."""
_ASKED = ("sites", "copies", "all_reduce", "all_gather", "all_to_all", "share", "delays")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network between the sites.

    Attributes:
        name: Name of the transport, as the user gave it.
        cost: Cost of its collectives for a site.
        own_bytes: Bytes of its own protocol in every message of a collective, where that is known.
        hub_bit_per_s: Rate of its hub's line each way, for all sites together; None for no limit,
            or no hub.
    """

    name: str
    cost: CostModel
    own_bytes: Mapping[Collective, int] = field(default_factory=dict)
    hub_bit_per_s: float | None = None

    @property
    def title(self) -> str:
        """Description for a table's title; empty for the default."""
        hub = self.hub_bit_per_s
        thin = "" if hub is None else f", hub {ShapedLink(rate_bit_per_s=hub).name}"
        return "" if self.name == "torch" else f", transport {self.name}{thin}"


def network_of(
    transport: str | Callable[[int], CostModel], sites: int, hub_bit_per_s: float | None = None
) -> Network:
    """Returns the network of a transport.

    Args:
        transport: ``torch``, ``star``, ``module:factory``, or a function that is given the number
            of sites and returns a `CostModel`.
        sites: S.
        hub_bit_per_s: Rate of the hub's line each way; None for no limit.

    Raises:
        RecipeError: There is no such transport, or it has no hub.
    """
    if transport == "torch":
        if hub_bit_per_s is not None:
            raise RecipeError("--hub-link: torch.distributed has no hub: add --transport star")
        return Network(name="torch", cost=RingCost(sites), own_bytes=GLOO_BYTES)
    if transport == "star":
        return Network(name="star", cost=StarCost(sites), hub_bit_per_s=hub_bit_per_s)
    name = transport if isinstance(transport, str) else getattr(transport, "__name__", "")
    cost = _costs(name, _factory(transport), sites)
    return Network(name=name, cost=cost, hub_bit_per_s=hub_bit_per_s)


def _factory(transport: str | Callable[[int], CostModel]) -> Callable[[int], object]:
    if not isinstance(transport, str):
        return transport
    if ":" not in transport:
        raise RecipeError(f"--transport must be torch, star or module:factory, not {transport!r}")
    return imported("--transport", transport)


def _costs(name: str, factory: Callable[[int], object], sites: int) -> CostModel:
    try:
        cost = factory(sites)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"--transport {name} raised {said}") from error
    lacking = [asked for asked in _ASKED if not hasattr(cost, asked)]
    if lacking:
        raise RecipeError(
            f"--transport {name} returned a {type(cost).__name__} without {', '.join(lacking)}: "
            f"return an outergrad.core.cost.CostModel of so many sites"
        )
    found = cast(CostModel, cost)
    if found.sites != sites:
        raise RecipeError(
            f"--transport {name} returned the costs of {found.sites} sites, not {sites}"
        )
    return found
