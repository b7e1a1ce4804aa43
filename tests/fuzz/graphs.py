"""Strategies that draw module graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.nodes import ACTIVATIONS, VOCABULARY, Graph, Node
from hypothesis import strategies as st

WIDTHS = st.sampled_from([3, 1, 2, 4, 5, 8, 24, 40])
CHANNELS = st.sampled_from([2, 1, 3, 4, 6])
FROZEN = st.sampled_from(["", "", "", "", "weight", "bias", "all"])
LINEARS = ("linear", "own forward", "tied", "branch")
"""Kinds whose module has one weight that maps from its second width to its first."""


class Drawing:
    """A graph that grows.

    Attributes:
        now: the kind and the sizes of what leaves the last node.
        nodes: so far.
    """

    def __init__(self, draw: Callable[[Any], Any], start: tuple[Any, ...], dtype: str) -> None:
        self._draw, self._dtype = draw, dtype
        self.now, self.nodes = start, list[Node]()
        self._kept: list[tuple[int, tuple[Any, ...]]] = []
        self._maps: list[tuple[int, int, int]] = []
        self._callable: list[tuple[int, tuple[Any, ...], tuple[Any, ...]]] = []

    def grow(self) -> None:
        """Adds a node of some kind that fits."""
        kinds = [*ANYWHERE * (self.now[0] != "ids"), *OF_KIND[self.now[0]]]
        kinds += ["add"] * 3 * bool(self._addable()) + ["again"] * 2 * bool(self._repeatable())
        kinds += ["tied", "transposed"] * bool(self._maps) * (self.now[0] in ("vec", "seq"))
        kinds += ["peek", "penalty"] * bool(self._maps) * (self.now[0] in ("vec", "seq"))
        getattr(self, "_" + self._draw(st.sampled_from(kinds)))()

    def finish(self) -> None:
        """Ends with something that is trained for sure."""
        if self.now[0] == "img":
            self._put("flatten", ("vec", self.now[1] * self.now[2] * self.now[3]))
        if self.now[0] == "ids":
            self._embedding()
        self._put("linear", self._wide(3), of={"in_features": self._width, "out_features": 3})

    # -- helpers ----------------------------------------------------------------------------------

    @property
    def _width(self) -> int:
        return self.now[1] if self.now[0] == "img" else self.now[-1]

    def _wide(self, width: int) -> tuple[Any, ...]:
        return (*self.now[:-1], width)

    def _one(self, *values: Any) -> Any:
        return self._draw(st.sampled_from(values))

    def _flag(self) -> bool:
        return self._draw(st.booleans())

    def _put(self, kind: str, after: tuple[Any, ...] | None = None, **options: Any) -> None:
        before, self.now = self.now, after or self.now
        index = len(self.nodes)
        self.nodes.append(Node(kind, options))
        if kind in LINEARS and not options.get("wide"):
            self._maps.append((index, before[-1], self.now[-1]))
        if kind in ("linear", "chain", "conv2d", "conv chain", "tied") and not options.get("wide"):
            self._callable.append((index, before, self.now))

    def _addable(self) -> list[int]:
        return [index for index, format in self._kept if format == self.now]

    def _repeatable(self) -> list[tuple[int, tuple[Any, ...]]]:
        return [(i, after) for i, before, after in self._callable if before == self.now]

    # -- anywhere ---------------------------------------------------------------------------------

    def _activation(self) -> None:
        self._put("activation", of={"name": self._one(*ACTIVATIONS)})

    def _keep(self) -> None:
        self._kept.append((len(self.nodes), self.now))
        self._put("keep")

    def _add(self) -> None:
        self._put("add", node=self._one(*self._addable()))

    def _again(self) -> None:
        node, after = self._one(*self._repeatable())
        self._put("again", after, node=node)

    def _detach(self) -> None:
        if self._draw(st.integers(0, 3)) == 3:
            self._put("detach")

    # -- rows and sequences -----------------------------------------------------------------------

    def _linear(self, kind: str = "linear") -> None:
        outputs, bias = self._draw(WIDTHS), self._flag()
        of = {"in_features": self._width, "out_features": outputs, "bias": bias}
        wide = self._dtype == "float32" and kind == "linear" and self._one(0, 0, 0, 0, 1) == 1
        frozen = self._draw(FROZEN)
        options = {"wide": True} if wide else {}
        options.update({"frozen": frozen} if frozen else {})
        self._put(kind, self._wide(outputs), of=of, **options)

    def _odd_linear(self) -> None:
        self._linear(self._one("own forward", "weight norm"))

    def _bilinear(self) -> None:
        width, outputs = self._width, self._draw(st.sampled_from([2, 1, 5]))
        of = {"in1_features": width, "in2_features": width, "out_features": outputs}
        self._put("bilinear", self._wide(outputs), of=of)

    def _chain(self) -> None:
        widths = [self._width, *self._draw(st.lists(WIDTHS, min_size=1, max_size=4))]
        names = st.sampled_from([*ACTIVATIONS, "norm"])
        between = self._draw(st.lists(names, min_size=0, max_size=len(widths)))
        of = {"widths": widths, "between": between, "bias": self._flag(), "nested": self._flag()}
        self._put(self._one("chain", "chain", "checkpoint"), self._wide(widths[-1]), of=of)

    def _tied(self) -> None:
        fitting = [(i, o) for i, n, o in self._maps if n == self._width]
        if fitting:
            node, outputs = self._one(*fitting)
            if self.nodes[node].kind != "tied":
                self._put("tied", self._wide(outputs), of={"node": node, "bias": self._flag()})

    def _transposed(self) -> None:
        fitting = [(i, n) for i, n, o in self._maps if o == self._width]
        if fitting:
            node, inputs = self._one(*fitting)
            self._put("transposed use", self._wide(inputs), node=node)

    def _penalty(self) -> None:
        self._put("penalty", node=self._one(*(i for i, _, _ in self._maps)))

    def _peek(self) -> None:
        fitting = [i for i, n, _ in self._maps if n == self._width]
        fitting = [i for i in fitting if self.nodes[i].kind != "embedding"]
        if fitting:
            self._put("peek", node=self._one(*fitting))

    def _branch(self) -> None:
        self._put("branch", of={"in_features": self._width, "out_features": self._width})

    def _layer_norm(self) -> None:
        self._put("layer norm", of={"normalized_shape": self._width})

    def _lookup(self) -> None:
        of = {"embedding_dim": self._width, "padding_idx": self._one(None, 0)}
        self._put("lookup", of=of | {"scale_grad_by_freq": self._one(False, False, True)})

    def _bag(self) -> None:
        of = {"embedding_dim": self._width, "padding_idx": self._one(None, 0)}
        self._put("bag", of=of | {"mode": self._one("mean", "sum", "max")})

    def _scale(self) -> None:
        self._put("scale", of={"shape": self._one((self._width,), (1,), ())})

    def _matrix(self) -> None:
        outputs = self._draw(WIDTHS)
        self._put("matrix", self._wide(outputs), of={"shape": (self._width, outputs)})

    # -- rows -------------------------------------------------------------------------------------

    def _batch_norm(self) -> None:
        self._put("batch norm", of={"num_features": self._width})

    def _repeat(self) -> None:
        length = self._one(2, 1, 3)
        self._put("repeat", ("seq", length, self._width), length=length)

    def _grid(self) -> None:
        size = self._one((3, 3), (2, 4), (1, 1))
        self._put("grid", ("img", self._width, *size), size=size)

    # -- sequences --------------------------------------------------------------------------------

    def _pool(self) -> None:
        self._put(self._one("mean", "last"), ("vec", self._width))

    def _conv1d(self) -> None:
        outputs, kernel, dilation = self._draw(CHANNELS), self._one(1, 2, 3), self._one(1, 2)
        padding = self._one(0, 1, 2)
        length = self.now[1] + 2 * padding - dilation * (kernel - 1)
        of = {"in_channels": self._width, "out_channels": outputs, "kernel_size": kernel}
        if length > 0:
            of |= {"padding": padding, "dilation": dilation, "bias": self._flag()}
            self._put("conv1d", ("seq", length, outputs), of=of)

    def _recurrent(self) -> None:
        kind, hidden = self._one("gru", "lstm", "rnn"), self._one(3, 1, 8)
        of = {"input_size": self._width, "hidden_size": hidden, "num_layers": self._one(1, 1, 2)}
        of |= {"bias": self._flag(), "bidirectional": self._one(False, False, True)}
        width = hidden
        if kind == "lstm" and hidden > 1 and self._one(0, 0, 1):
            width = of["proj_size"] = hidden - 1
        after = self._wide(width * (1 + of["bidirectional"]))
        self._put(kind, after, of=of, last=self._flag())

    def _cell(self) -> None:
        hidden = self._one(3, 1, 8)
        of = {"input_size": self._width, "hidden_size": hidden, "bias": self._flag()}
        self._put("gru cell", self._wide(hidden), of=of)

    def _attention(self) -> None:
        heads = self._one(*(h for h in (1, 2, 3) if self._width % h == 0))
        of = {"embed_dim": self._width, "num_heads": heads, "bias": self._flag()}
        of |= {"add_bias_kv": self._one(False, False, True)}
        self._put("attention", of=of, memory=self._flag(), weights=self._flag())

    # -- images -----------------------------------------------------------------------------------

    def _conv2d(self) -> None:
        _, channels, height, width = self.now
        outputs, kernel = self._draw(CHANNELS), self._one(1, 2, 3)
        groups = self._one(*(g for g in (1, 1, 2, 3) if channels % g == outputs % g == 0))
        stride, dilation, padding = self._one(1, 2), self._one(1, 2), self._one(0, 1, 2)
        sizes = [
            (n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in (height, width)
        ]
        mode = self._one("zeros", "zeros", "reflect", "circular", "replicate")
        if min(sizes) < 1 or (mode != "zeros" and padding >= min(height, width)):
            return
        of = {"in_channels": channels, "out_channels": outputs, "kernel_size": kernel}
        of |= {"groups": groups, "stride": stride, "dilation": dilation, "padding": padding}
        of |= {"padding_mode": mode, "bias": self._flag()}
        self._put("conv2d", ("img", outputs, *sizes), of=of)

    def _conv_chain(self) -> None:
        channels = [self.now[1], *self._draw(st.lists(CHANNELS, min_size=1, max_size=3))]
        of = {"channels": channels, "between": self._one(*ACTIVATIONS)}
        self._put("conv chain", ("img", channels[-1], *self.now[2:]), of=of)

    def _transposed_conv(self) -> None:
        of = {"in_channels": self.now[1], "out_channels": 2, "kernel_size": 2}
        self._put("transposed conv", ("img", 2, self.now[2] + 1, self.now[3] + 1), of=of)

    def _image_norm(self) -> None:
        if self._flag():
            self._put("batch norm of images", of={"num_features": self.now[1]})
        else:
            self._put("group norm", of={"num_groups": 1, "num_channels": self.now[1]})

    def _flatten(self) -> None:
        self._put("flatten", ("vec", self.now[1] * self.now[2] * self.now[3]))

    # -- ids --------------------------------------------------------------------------------------

    def _embedding(self) -> None:
        width = self._draw(WIDTHS)
        self._maps.append((len(self.nodes), width, VOCABULARY))
        of = {"embedding_dim": width, "padding_idx": self._one(None, 0)}
        self._put("embedding", ("seq", self.now[1], width), of=of)


ANYWHERE = ["activation", "keep"]  # but not on ids
_WIDTH = ["linear", "linear", "odd_linear", "bilinear", "chain", "chain", "branch", "layer_norm"]
_WIDTH += ["lookup", "bag", "scale", "matrix", "detach"]
OF_KIND = {
    "vec": [*_WIDTH, "batch_norm", "repeat", "grid"],
    "seq": [*_WIDTH, "pool", "conv1d", "recurrent", "recurrent", "cell", "attention", "attention"],
    "img": ["conv2d", "conv2d", "conv_chain", "transposed_conv", "image_norm", "flatten"],
    "ids": ["embedding"],
}


@st.composite
def starts(draw: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What enters a graph."""
    kind = draw(st.sampled_from(["vec", "seq", "img", "ids"]))
    if kind == "vec":
        return ("vec", draw(WIDTHS))
    if kind == "img":
        return ("img", draw(CHANNELS), *draw(st.sampled_from([(3, 3), (5, 4), (1, 1)])))
    length = draw(st.sampled_from([2, 1, 4]))
    return (kind, length, draw(WIDTHS)) if kind == "seq" else (kind, length)


@st.composite
def graphs(draw: Callable[[Any], Any], dtype: str = "float32", largest: int = 8) -> Graph:
    """Draws a graph.

    Args:
        dtype: of its parameters.
        largest: number of nodes, but for those that end it.
    """
    start = draw(starts())
    drawing = Drawing(draw, start, dtype)
    for _ in range(draw(st.integers(0, largest))):
        drawing.grow()
    drawing.finish()
    early = draw(st.none() | st.integers(0, len(drawing.nodes) - 1))
    return Graph(start, tuple(drawing.nodes), dtype, early)
