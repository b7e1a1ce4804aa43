"""Choice of the layers that graphs of torch.compile tap."""

from __future__ import annotations

from collections.abc import Mapping

from outergrad.capture.tapped_layer import TappedLayer


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
