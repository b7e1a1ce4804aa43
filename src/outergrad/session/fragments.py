"""Fragments of a model that take turns: what each exchange of `og.LocalSteps` is about."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outergrad.core.model import Compressors, Model
from outergrad.core.types import StateDict
from outergrad.methods.local_steps import LocalSteps
from outergrad.session.inspect import Inspection


@dataclass
class Fragment:
    """A part of the weights.

    Attributes:
        names: of its parameters.
        differs: whether sites may have other weights of it than the shared ones.
        samples: of this site, up to its next exchange; those of its last one until there are more.
        is_spent: whether they are those of its last one.
    """

    names: frozenset[str]
    differs: bool = False
    samples: int = 0
    is_spent: bool = True

    def count(self, samples: int) -> None:
        """Adds those of the last steps."""
        self.samples = samples if self.is_spent else self.samples + samples
        self.is_spent = False


class Fragments:
    """The fragments of a model, and whose turn it is.

    Args:
        parts: names of the parameters of each.
    """

    def __init__(self, parts: Sequence[frozenset[str]]) -> None:
        self._all = [Fragment(names) for names in parts]
        self._turn = 0

    @property
    def due(self) -> Fragment:
        """Whose turn it is."""
        return self._all[self._turn]

    def pass_on(self) -> None:
        """It is the next one's turn."""
        self._turn = (self._turn + 1) % len(self._all)

    def seek(self) -> bool:
        """Passes on to the next one that differs between sites; whether there is one."""
        if not any(fragment.differs for fragment in self._all):
            return False
        while not self.due.differs:
            self.pass_on()
        return True

    def stepped(self) -> None:
        """This site has changed its weights."""
        for fragment in self._all:
            fragment.differs = True

    def count(self, samples: int) -> None:
        """Takes note of those of the last steps."""
        for fragment in self._all:
            fragment.count(samples)

    def told(self, name: str) -> str:
        """Which fragment a parameter is in, in words; nothing where there is only one."""
        index = next(k for k, fragment in enumerate(self._all) if name in fragment.names)
        several = len(self._all) > 1
        return f", fragment {index + 1} of {len(self._all)}" if several else ""

    def state(self) -> StateDict:
        """To be saved."""
        own = [[f.differs, f.samples, f.is_spent] for f in self._all]
        return {"turn": self._turn, "fragments": own}

    def load(self, state: StateDict) -> None:
        """Goes on from there."""
        self._turn = state["turn"]
        for fragment, own in zip(self._all, state["fragments"], strict=True):
            fragment.differs, fragment.samples, fragment.is_spent = own


def streamed(inspection: Inspection, method: LocalSteps) -> Inspection:
    """A model of which a fragment at a time is exchanged: each has compressors of its own.

    Args:
        inspection: of the whole.
        method: says how many fragments there are.

    Raises:
        ValueError: the model has fewer parts.
    """
    if method.stream == 1:
        return inspection
    parts = _parts(inspection.model, method.stream)
    own = [
        (copy.deepcopy(compressor), found)
        for part in parts
        for compressor, units in inspection.compressors.items()
        if (found := [unit for unit in units if part.issuperset(unit.params)])
    ]
    return replace(inspection, compressors=Compressors(own, parts))


def _parts(model: Model, count: int) -> list[frozenset[str]]:
    """Names of about equal numbers of elements; what travels together stays so.

    The largest first, each goes to the part that has least: of layers that are alike the i-th goes
    to part i mod `count`, a strided order, as in arXiv 2501.18512, section 3.1.
    """
    together = {name: unit.params for unit in model.units for name in unit.params}
    pieces = dict.fromkeys(together.get(name, (name,)) for name in model.params)
    if len(pieces) < count:
        raise ValueError(
            f"LocalSteps: stream={count}, but the model has {len(pieces)} parameters that can "
            f"travel apart; use that or less"
        )
    sizes = {piece: sum(model.params[name].numel() for name in piece) for piece in pieces}
    parts, filled = [list[str]() for _ in range(count)], [0] * count
    for piece in sorted(sizes, key=lambda one: -sizes[one]):
        least = filled.index(min(filled))
        parts[least] += piece
        filled[least] += sizes[piece]
    return list(map(frozenset, parts))
