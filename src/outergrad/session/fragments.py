"""Fragments of a model, of which `og.LocalSteps(stream=n)` exchanges one at a time, in turn."""

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
    """Part of the weights that is exchanged at once.

    Attributes:
        names: names of its parameters.
        differs: whether sites may have other weights here than the shared ones.
        samples: number of samples of this site since the last exchange of the fragment; until there
            are some, that of the last exchange.
        is_spent: whether `samples` is that of the last exchange.
    """

    names: frozenset[str]
    differs: bool = False
    samples: int = 0
    is_spent: bool = True

    def count(self, samples: int) -> None:
        """Adds the number of samples of the last steps."""
        self.samples = samples if self.is_spent else self.samples + samples
        self.is_spent = False

    def keep(self, before: Fragment) -> None:
        """Goes back to how it was before an exchange for which this site kept its change."""
        self.differs, self.samples, self.is_spent = before.differs, before.samples, before.is_spent


class Fragments:
    """Fragments of a model, and which of them is exchanged next.

    Args:
        parts: per fragment, names of its parameters.
    """

    def __init__(self, parts: Sequence[frozenset[str]]) -> None:
        self._all = [Fragment(names) for names in parts]
        self._turn = 0

    @property
    def due(self) -> Fragment:
        """Fragment that is exchanged next."""
        return self._all[self._turn]

    def pass_on(self) -> None:
        """Advances to the next fragment."""
        self._turn = (self._turn + 1) % len(self._all)

    def seek(self) -> bool:
        """Advances to the first fragment, from this one on, that differs; False if none does."""
        if not any(fragment.differs for fragment in self._all):
            return False
        while not self.due.differs:
            self.pass_on()
        return True

    def stepped(self) -> None:
        """Notes that this site has changed its weights, so that all fragments differ."""
        for fragment in self._all:
            fragment.differs = True

    def count(self, samples: int) -> None:
        """Adds the number of samples of the last steps to all fragments."""
        for fragment in self._all:
            fragment.count(samples)

    def told(self, name: str) -> str:
        """Says which fragment a parameter is in; an empty text if there is only one."""
        index = next(k for k, fragment in enumerate(self._all) if name in fragment.names)
        several = len(self._all) > 1
        return f", fragment {index + 1} of {len(self._all)}" if several else ""

    def state(self) -> StateDict:
        """Returns the state to be saved."""
        own = [[f.differs, f.samples, f.is_spent] for f in self._all]
        return {"turn": self._turn, "fragments": own}

    def load(self, state: StateDict) -> None:
        """Goes on from a saved state."""
        self._turn = state["turn"]
        for fragment, own in zip(self._all, state["fragments"], strict=True):
            fragment.differs, fragment.samples, fragment.is_spent = own


def streamed(inspection: Inspection, method: LocalSteps) -> Inspection:
    """Divides a model into fragments, with compressors of their own.

    Args:
        inspection: of the whole model.
        method: says how many fragments there are.

    Raises:
        ValueError: the model has fewer parts that can travel apart.
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
    """Divides parameters into `count` parts of about equal size; those of one unit stay together.

    The largest first, each goes to the part that has fewest elements. Of equal layers the i-th goes
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
