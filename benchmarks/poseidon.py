"""Bytes that a site sends per step for each layer of VGG19: Poseidon's rule, beside ours.

    python benchmarks/poseidon.py [--sites 2,4,8,16,32] [--rows 32] [--layers]

A site has 32 images of 224 x 224 pixels, as in Poseidon (arXiv 1706.03292, section 3.2). For a
layer of M x N weights, P sites and B rows per site a site sends, in float32:

- "server": 2 (P - 1) / P numbers for each number of the layer, if the parameter server is spread
  over the P sites. It sends its gradient to the other servers, and its part of the weights to the
  other sites.
- "ring": as much, in a ring all-reduce (`og.Dense`).
- "Poseidon": B (P - 1) (M + N) for the factors of a fully connected layer, if this is not more than
  the server's; as by a server if it is, and for convolutions. The paper adds what is received, so
  its formulas are twice these.
- "dAD", "rank-dAD": what the compressors of `og.DAD()` and `og.RankDAD(rank=4)` choose, as in a
  training. Biases travel apart.

Columns: sites; layer; megabytes that a site sends of it; the layer's choice by dAD. By default
neighbours in the model with one choice share a line; `--layers` has a line for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import outergrad as og
from outergrad.comm.cost import RingCost
from outergrad.core.protocols import Method
from outergrad.core.transport import Capability
from outergrad.core.types import Route, Slot, Unit
from outergrad.methods.common import bias_bytes, row_bytes

SITES, ROWS = (2, 4, 8, 16, 32), 32
BYTES = 4
RANK = 4
_CONVOLUTIONS = ((64, 2, 224), (128, 2, 112), (256, 4, 56), (512, 4, 28), (512, 4, 14))
"""Channels, number and height of the convolutions of 3 x 3 between two poolings."""
_CONNECTED = ((25088, 4096), (4096, 4096), (4096, 1000))


@dataclass(frozen=True)
class Layer:
    """A layer with a weight and a bias.

    Attributes:
        name: As the paper on VGG has it: conv1_1, fc6.
        outputs: Rows of its weight, M.
        inputs: Columns of its weight as a matrix, N.
        rows: Rows of activations per image: 1, or the positions of a convolution.
    """

    name: str
    outputs: int
    inputs: int
    rows: int = 1

    @property
    def is_connected(self) -> bool:
        """True if it is fully connected."""
        return self.rows == 1

    @property
    def numel(self) -> int:
        """Number of its parameters."""
        return self.outputs * (self.inputs + 1)

    @property
    def unit(self) -> Unit:
        """The layer as the library's planner knows it."""
        weight, bias = f"{self.name}.weight", f"{self.name}.bias"
        patches = not self.is_connected
        slot = Slot(self.name, weight, self.outputs, self.inputs, bias=bias, patches=patches)
        return Unit((slot,), (weight, bias), self.numel, (slot._replace(bias=None),))


def vgg19() -> Iterator[Layer]:
    """Yields the layers of VGG19 for images of 224 x 224 pixels in 1000 classes."""
    inputs = 3
    for block, (channels, count, side) in enumerate(_CONVOLUTIONS, 1):
        for k in range(1, count + 1):
            yield Layer(f"conv{block}_{k}", channels, 9 * inputs, side**2)
            inputs = channels
    for k, (inputs, outputs) in enumerate(_CONNECTED, 6):
        yield Layer(f"fc{k}", outputs, inputs)


def summed(layer: Layer, sites: int, rows: int) -> float:
    """Bytes by a ring, or by a server that is spread over the sites; `rows` do not matter."""
    return BYTES * 2 * (sites - 1) / sites * layer.numel


def factors(layer: Layer, sites: int, rows: int) -> float:
    """Bytes of sufficient factors, which every site sends to all others."""
    return BYTES * (sites - 1) * rows * layer.rows * (layer.outputs + layer.inputs)


def poseidon(layer: Layer, sites: int, rows: int) -> float:
    """Bytes by Poseidon's rule."""
    by_server = summed(layer, sites, rows)
    return min(by_server, factors(layer, sites, rows)) if layer.is_connected else by_server


def chosen(method: Method, layer: Layer, sites: int, rows: int) -> tuple[Route, int]:
    """Returns how a method of the library sends a layer, and as how many rows of factors.

    Among more than two sites low rank is summed: so it is where no link has been measured.
    """
    compressor, cost = method.compressor(), RingCost(sites)
    compressor.settle(cost, frozenset(Capability))
    unit, rows_SK = layer.unit, [[rows * layer.rows]] * sites
    route = compressor.route(unit, rows_SK, tapped=compressor.taps(unit, rows_SK))
    return route, compressor.sent_rows(unit.slots[0], rows * layer.rows, 0)


def by_method(method: Method) -> Callable[[Layer, int, int], float]:
    """Returns the function of the bytes that a method sends."""

    def sent_bytes(layer: Layer, sites: int, rows: int) -> float:
        (route, count), (slot,) = chosen(method, layer, sites, rows), layer.unit.slots
        if route == Route.DENSE:
            return summed(layer, sites, rows)
        nbytes = count * row_bytes(slot) + bias_bytes([slot])
        return (sites - 1) * nbytes * (1 if route == Route.GATHER else 2 / sites)

    return sent_bytes


WAYS: dict[str, Callable[[Layer, int, int], float]] = {
    "server": summed,
    "ring": summed,
    "Poseidon": poseidon,
    "dAD": by_method(og.DAD()),
    "rank-dAD": by_method(og.RankDAD(rank=RANK)),
}


def lines(sites: int, rows: int, *, each: bool = False) -> Iterator[list[str]]:
    """Yields a line per layer, or per run of layers with one choice, and one for all."""
    layers = list(vgg19())

    def choice(layer: Layer) -> str:
        return chosen(og.DAD(), layer, sites, rows)[0].value

    def kind(layer: Layer) -> str:
        return layer.name if each or layer.is_connected else f"convolutions, {choice(layer)}"

    for _, run in groupby(layers, kind):
        found = list(run)
        name = found[0].name if len(found) == 1 else f"{len(found)} convolutions"
        by_factors = choice(found[0]) == Route.GATHER.value
        yield [
            str(sites),
            name,
            *_megabytes(found, sites, rows),
            "factors" if by_factors else "sum",
        ]
    yield [str(sites), "all", *_megabytes(layers, sites, rows), ""]


def _megabytes(layers: Sequence[Layer], sites: int, rows: int) -> Iterator[str]:
    for way in WAYS.values():
        yield f"{sum(way(layer, sites, rows) for layer in layers) / 1e6:,.1f}"


def main() -> None:
    """Prints the table."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--sites", default=",".join(map(str, SITES)))
    asked.add_argument("--rows", type=int, default=ROWS)
    asked.add_argument("--layers", action="store_true")
    given = asked.parse_args()
    print(f"| sites | layer | {' | '.join(WAYS)} | dAD sends |")
    print(f"|---|---|{'---:|' * len(WAYS)}---|")
    for sites in map(int, given.sites.split(",")):
        for line in lines(sites, given.rows, each=given.layers):
            print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
