"""Mode of each layer in the next forward: through taps, counting rows, or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from outergrad.capture.tapped_layer import TappedLayer
from outergrad.core.model import Choice
from outergrad.core.types import Source, Unit


class GraphTaps:
    """Changes the set of tapped layers at most twice, since each change recompiles the graphs.

    Layers that the first step does not choose are not tapped. As soon as a later step chooses one
    of them, all layers are tapped for good: a tap costs little more than autograd's own gradient.
    """

    def __init__(self) -> None:
        self._settled, self._off = False, set[TappedLayer]()

    def follow(self, tap_next: Mapping[TappedLayer, bool]) -> None:
        """Applies the choice of the layers that a step wants tapped in the next one."""
        if not self._settled:
            self._settled = True
            self._off = {layer for layer, taps in tap_next.items() if not taps}
        elif any(tap_next[layer] for layer in self._off):
            self._off = set()
        else:
            return
        for layer in tap_next:
            layer.tap_in_graphs(tap_next=layer not in self._off)


class NextForward:
    """State of the layers for the next forward, which follows what steps have chosen.

    Args:
        units: units of the model.
        tap_next: per unit, whether it is tapped in the first forward.

    Attributes:
        tap_next: per unit, whether it is tapped in the next forward.
        layers: the layers whose classes were swapped.
        rests: whether no layer taps or counts what goes through it.
    """

    def __init__(self, units: Sequence[Unit], tap_next: Sequence[bool]) -> None:
        self.tap_next = dict(zip(units, tap_next, strict=True))
        self.layers: list[TappedLayer] = []
        self.rests = True
        self._unit_of = {source: unit for unit in units for source in unit.sources}
        self._graphs = GraphTaps()
        self._followed: Choice | None = None
        self._counting: AbstractSet[Unit] | None = None

    def add(self, layer: TappedLayer) -> None:
        """Adds a layer, which counts rows at first."""
        self.layers.append(layer)
        self.rests = False

    def taps(self, sources: Sequence[Source]) -> bool:
        """True if the unit of some of these is tapped in the next forward."""
        units = map(self._unit_of.__getitem__, sources)
        return any(map(self.tap_next.__getitem__, units))

    def follow(self, units: Sequence[Unit], choice: Choice) -> bool:
        """Follows the choice of a step of these units; False if it was followed already."""
        if choice is self._followed:
            return False
        self._followed = choice
        self.tap_next.update(zip(units, choice.tap_next, strict=True))
        self._graphs.follow({layer: self.taps(layer.slots) for layer in self.layers})
        return True

    def resume(self, tap_next: Mapping[Unit, bool]) -> None:
        """Goes on from a saved step; all layers count rows."""
        self.tap_next, self._followed = dict(tap_next), None
        self.let_rest(None)

    def let_rest(self, counting: AbstractSet[Unit] | None) -> None:
        """Spares layers the counting of rows from which nothing follows.

        Args:
            counting: units whose layers count rows; None for all.
        """
        if counting is self._counting:
            return
        self._counting = counting
        for layer in self.layers:
            units = {self._unit_of[slot] for slot in layer.slots}
            layer.let_rest(counting is not None and counting.isdisjoint(units))
        self.rests = all(layer.rests for layer in self.layers)
