"""Checkpoints of a session: the state that it saves, and how the sites go on from saved states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outergrad.comm.agree import agree
from outergrad.core.model import Model
from outergrad.core.transport import Comm
from outergrad.core.types import Inheritance, Place, StateDict, Unit, place_name

VERSION = 2
_COUNTED = ("sparse", "policy", "owing")
"""Keys of the common state that the sites share because they have made the same steps."""
_REMEDY = "load on every site what all sites saved after the same step"


@dataclass(frozen=True)
class Owner:
    """Identity of the session that a state belongs to.

    Attributes:
        method: the method and its settings, as text.
        model: the trained part of the model.
        rank: number of this site.
        called: this site in words.
        sites: number of sites.
        local: names of the parameters that each site keeps to itself.
    """

    method: str
    model: Model
    rank: int
    called: str
    sites: int
    local: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the parameters, by name."""
        return {name: list(p.shape) for name, p in self.model.params.items()}

    @property
    def places(self) -> dict[str, Place]:
        """Places of all gradients that could be products, by name."""
        return {place_name(place): place for unit in self.model.units for place in _places(unit)}


@dataclass(frozen=True)
class Progress:
    """Progress of a session.

    Attributes:
        step: number of synchronised steps so far.
        tap_next: per unit, whether it is tapped in the next forward.
        has_autograd_grad: parameters that travel dense because autograd has a gradient for them
            besides their factors.
    """

    step: int
    tap_next: Mapping[Unit, bool]
    has_autograd_grad: Sequence[str]


def saved(owner: Owner, progress: Progress, remembered: Sequence[StateDict]) -> StateDict:
    """Returns the state of a session and its compressors, with copies of all tensors."""
    tap_next = progress.tap_next.items()
    return {
        "version": VERSION,
        "method": owner.method,
        "rank": owner.rank,
        "sites": owner.sites,
        "step": progress.step,
        "shapes": owner.shapes,
        "local": list(owner.local),
        "tapped": {place_name(p): taps for unit, taps in tap_next for p in _places(unit)},
        "mixed": list(progress.has_autograd_grad),
        "exchanges": _copied(remembered),
    }


def resumed(
    given: StateDict | Sequence[StateDict], owner: Owner, comm: Comm
) -> tuple[Progress, list[Inheritance]]:
    """Checks saved states together with the other sites; changes nothing yet.

    Args:
        given: this site's saved state, or those of all sites that there were.
        owner: the session that goes on.
        comm: the transport: all sites check together.

    Returns:
        The progress, and what each compressor of this site goes on from.

    Raises:
        ValueError: on all sites, if some site cannot go on from what it was given.
    """
    error, lines, states, some = None, [], {}, {}
    try:
        states = _checked(given, owner)
        some = next(iter(states.values()))
        lines = _common_lines(some)
    except ValueError as raised:
        error = raised
    agree(comm, lines, error, _REMEDY)
    first_places = {unit: place_name(_places(unit)[0]) for unit in owner.model.units}
    tap_next = {unit: some["tapped"][place] for unit, place in first_places.items()}
    compressors = range(len(some["exchanges"]))
    inheritances = [_inheritance(states, owner, comm.device, index) for index in compressors]
    return Progress(some["step"], tap_next, some["mixed"]), inheritances


# -- checks -----------------------------------------------------------------------------------


def _checked(given: StateDict | Sequence[StateDict], owner: Owner) -> dict[int, StateDict]:
    """Returns the states by the rank that saved them; a list has to be of all sites."""
    if not isinstance(given, list | tuple):
        state = _of_owner(given, owner)
        _check_own(state, owner)
        return {owner.rank: state}
    if not given:
        raise ValueError("the list of states is empty: pass those of all sites that there were")
    states = [_of_owner(state, owner) for state in given]
    _check_all(states)
    return dict(enumerate(states))


def _of_owner(state: Any, owner: Owner) -> StateDict:
    """Returns the state; raises unless it is of this version, method and model."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise ValueError(
            f"the state has version {version}, this outergrad knows version {VERSION}: pass what "
            f"session.state_dict() returned, and use the outergrad that saved it"
        )
    if state["method"] != owner.method:
        raise ValueError(
            f"the state is of the method {state['method']}, the model was distributed with "
            f"{owner.method}: pass the method that was saved to og.distribute()"
        )
    _check_same("parameter", state["shapes"], owner.shapes)
    _check_same("product", *(dict.fromkeys(x, "known") for x in (state["tapped"], owner.places)))
    return state


def _check_same(kind: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name):
            was, found = (shapes.get(name, "nothing") for shapes in (then, now))
            raise ValueError(
                f"the state is of another model: {kind} {name!r} was {was} and is {found}; build "
                f"the model that was saved"
            )


def _check_own(state: StateDict, owner: Owner) -> None:
    if state["sites"] != owner.sites:
        raise ValueError(
            f"the state is one of {state['sites']} sites, now there are {owner.sites}: pass a list "
            f"of the states of all {state['sites']}, in the order of their ranks, on every site"
        )
    if state["rank"] != owner.rank:
        raise ValueError(
            f"the state is of rank {state['rank']}, and {owner.called} has rank {owner.rank}: load "
            f"what this site saved"
        )


def _check_all(states: Sequence[StateDict]) -> None:
    for index, state in enumerate(states):
        if (state["rank"], state["sites"]) != (index, len(states)):
            raise ValueError(
                f"state {index} of the list of {len(states)} is of rank {state['rank']} of "
                f"{state['sites']}: pass those of all sites, in the order of their ranks"
            )
        if state["step"] != states[0]["step"]:
            raise ValueError(
                f"the state of rank {index} was saved after step {state['step']}, that of rank 0 "
                f"after step {states[0]['step']}: {_REMEDY}"
            )


def _common_lines(state: StateDict) -> list[str]:
    """Lines that all sites must have saved alike: the lengths of messages follow from them."""
    lines = [f"step: {state['step']}", f"saved by {state['sites']} sites"]
    lines += [f"travels dense: {name}" for name in state["mixed"]]
    for compressor in state["exchanges"]:
        for what, values in compressor.get("common", {}).items():
            lines += [f"{what} of {name}: {value}" for name, value in sorted(values.items())]
    return lines


# -- inheritances -----------------------------------------------------------------------------


def _inheritance(
    states: Mapping[int, StateDict], owner: Owner, device: torch.device, index: int
) -> Inheritance:
    """Returns what one compressor goes on from; with as many sites as before its own state."""
    rank, sites = owner.rank, owner.sites
    old = next(iter(states.values()))["sites"]
    like = rank % old
    first = like if old == sites else 0
    residual = range(rank, old, sites)
    used = {k: _copied(states[k]["exchanges"][index], device) for k in {first, like, *residual}}
    return Inheritance(
        place_of=owner.places,
        first=used[first],
        like=used[like],
        residual=[used[k] for k in residual],
        weight=sites / old,
        predecessors=[site % old for site in range(sites)],
    )


def survived(
    states: Sequence[StateDict],
    owner: Owner,
    predecessors: Sequence[int],
    weight: float,
    device: torch.device,
) -> list[Inheritance]:
    """Returns what a site's compressors go on from after sites were lost, or have joined.

    Each site keeps its own residuals. What sites know of each other is forgotten: one that took the
    last step's result from another may not have received all of it.

    Args:
        states: states of this site's compressors.
        owner: the session that they belong to.
        predecessors: per site, its rank until now.
        weight: number of sites now, divided by that before.
        device: of the tensors.
    """
    found: list[Inheritance] = []
    for state in map(_copied, states):
        common = {what: {} for what in state.get("common", {})} | _counted(state)
        first = {"common": common, "own": {**state.get("own", {}), "memories": {}}}
        found.append(Inheritance(owner.places, first, state, [state], weight, predecessors))
    return found


def known_to_all(state: StateDict) -> StateDict:
    """Returns the part of a compressor's state for a joining site: no residual is in it."""
    way = {k: v for k, v in state.get("common", {}).items() if k == "way"}
    return {"common": {**_counted(state), **way}}


def arrived(
    own: Sequence[StateDict], found: Sequence[StateDict], owner: Owner, sites: int
) -> list[Inheritance]:
    """Returns what the compressors of a joining site go on from.

    Args:
        own: their states, which are still empty.
        found: per compressor, what `known_to_all` returned on the others.
        owner: the session that they belong to.
        sites: number of sites.
    """
    inheritances: list[Inheritance] = []
    for state, told in zip(own, found, strict=True):
        common = {what: {} for what in state.get("common", {})} | told["common"]
        first = {**state, "common": common}
        inheritances.append(Inheritance(owner.places, first, first, [], 1.0, [0] * sites))
    return inheritances


def _counted(state: StateDict) -> StateDict:
    return {k: v for k, v in state.get("common", {}).items() if k in _COUNTED}


def _places(unit: Unit) -> list[Place]:
    if unit.block is not None:
        return [(name, None) for name in unit.params]
    return [slot.place for slot in (*unit.slots, *unit.matrices)]


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, Tensor):
        own = torch.empty_like(value, device=device, memory_format=torch.contiguous_format)
        return own.copy_(value.detach())
    if isinstance(value, Mapping):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item, device) for item in value]
    return value
