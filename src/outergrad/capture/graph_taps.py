"""Which layers the graphs of torch.compile tap."""

from __future__ import annotations

from collections.abc import Mapping

from outergrad.capture.tapped_layer import TappedLayer


class GraphTaps:
    """Changes what is tapped twice at most: to compile a graph takes long.

    What the first step does not want is not tapped; as soon as something of it is wanted again,
    everything is, from then on: it costs little more than a gradient of autograd's.
    """

    def __init__(self) -> None:
        self._settled, self._off = False, set[TappedLayer]()

    def follow(self, tap_next: Mapping[TappedLayer, bool]) -> None:
        """Takes in what a step has chosen for the next one."""
        if not self._settled:
            self._settled = True
            self._off = {layer for layer, taps in tap_next.items() if not taps}
        elif any(tap_next[layer] for layer in self._off):
            self._off = set()
        else:
            return
        for layer in tap_next:
            layer.tap_in_graphs(tap_next=layer not in self._off)
