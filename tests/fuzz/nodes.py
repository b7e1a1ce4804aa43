"""What a random module graph is made of: nodes as plain data, and the module that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from cases import Boom, OwnForward

VOCABULARY = 7


class Node(NamedTuple):
    """One operation on what flows through a graph.

    Attributes:
        kind: a key of `BUILD` or `RUN`.
        options: of its module, or how it is run.
    """

    kind: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Graph:
    """A module graph as plain data.

    Attributes:
        start: what enters: a kind of tensor and its sizes without the rows.
        nodes: run one after another.
        dtype: of parameters and inputs: "float32", "float64", or "autocast": bfloat16 products.
        early: the loss has a term at the output of this node, too.
    """

    start: tuple[Any, ...]
    nodes: tuple[Node, ...]
    dtype: str = "float32"
    early: int | None = None

    def build(self) -> Net:
        """With the weights that it always has."""
        torch.manual_seed(0)
        net = Net(self)
        return net.double() if self.dtype == "float64" else net


class Pick(NamedTuple):
    """What one forward is to do besides.

    Attributes:
        on: whether optional branches and penalties are in use.
        early: stop at the graph's early node.
        boom: raise in backward, behind the first node, when the last one has had its deltas.
    """

    on: bool = True
    early: bool = False
    boom: bool = False


class Net(nn.Module):
    """Runs a graph; returns a loss, a sum over rows, so that none are no trouble."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        for i, node in enumerate(graph.nodes):
            made = BUILD.get(node.kind)
            if made is not None:
                module = made(self, **node.options.get("of", {}))
                setattr(self, f"n{i}", _prepared(module, node.options))

    def forward(self, x: Tensor, pick: Pick) -> Tensor:
        kept: dict[int, Tensor] = {}
        penalties: list[Tensor] = []
        terms: list[Tensor] = []
        for i, node in enumerate(self.graph.nodes):
            run = RUN.get(node.kind, _call)
            x = run(Place(self, i, node.options, pick, kept, penalties), x)
            if pick.boom and i == 0 and len(self.graph.nodes) > 1:
                x = Boom.apply(x, True)
            if self.graph.early == i:
                terms.append(0.1 * (x.clone() ** 2).sum())
                if pick.early:
                    return terms[0]
        return sum([*terms, *penalties], (x * x).sum() / 10 + x.sin().sum() / 10)


class Place(NamedTuple):
    """Where in a forward a node runs."""

    net: Net
    index: int
    options: dict[str, Any]
    pick: Pick
    kept: dict[int, Tensor]
    penalties: list[Tensor]

    @property
    def module(self) -> Any:
        return getattr(self.net, f"n{self.index}")

    @property
    def other(self) -> Any:
        """The module of the earlier node that this one speaks of."""
        return getattr(self.net, f"n{self.options['node']}")


def _prepared(module: Any, options: dict[str, Any]) -> Any:
    if options.get("wide"):
        module.double()
    for name, p in list(module.named_parameters()) if isinstance(module, nn.Module) else ():
        frozen = options.get("frozen", "")
        if frozen == "all" or (frozen and frozen in name):
            p.requires_grad_(False)
    return module


# -- modules -------------------------------------------------------------------------------------

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "leaky in place": lambda: nn.LeakyReLU(inplace=True),
    "softplus": nn.Softplus,
    "none": nn.Identity,
    "dropout of nothing": lambda: nn.Dropout(0.0),
}


def chain(net: Net, widths: list[int], between: list[str], bias: bool, nested: bool) -> nn.Module:
    """Linear layers in a Sequential, with elementwise functions between."""
    parts: list[nn.Module] = []
    for i in range(len(widths) - 1):
        parts += [nn.Linear(widths[i], widths[i + 1], bias=bias)]
        parts += [
            nn.LayerNorm(widths[i + 1]) if f == "norm" else ACTIVATIONS[f]()
            for f in between[i : i + 1]
        ]
    half = len(parts) // 2
    return (
        nn.Sequential(nn.Sequential(*parts[:half]), *parts[half:])
        if nested
        else (nn.Sequential(*parts))
    )


def conv_chain(net: Net, channels: list[int], between: str) -> nn.Module:
    """Convolutions in a Sequential."""
    parts: list[nn.Module] = []
    for i in range(len(channels) - 1):
        parts += [nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), ACTIVATIONS[between]()]
    return nn.Sequential(*parts)


def tied(net: Net, node: int, bias: bool) -> nn.Module:
    """A linear layer with the weight of another one, or of an embedding."""
    weight = getattr(net, f"n{node}").weight
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
    layer.weight = weight
    return layer


BUILD: dict[str, Callable[..., Any]] = {
    "linear": lambda net, **of: nn.Linear(**of),
    "own forward": lambda net, **of: OwnForward(**of),
    "weight norm": lambda net, **of: parametrizations.weight_norm(nn.Linear(**of)),
    "bilinear": lambda net, **of: nn.Bilinear(**of),
    "chain": chain,
    "checkpoint": chain,
    "conv chain": conv_chain,
    "tied": tied,
    "branch": lambda net, **of: nn.Linear(**of),
    "layer norm": lambda net, **of: nn.LayerNorm(**of),
    "batch norm": lambda net, **of: nn.BatchNorm1d(**of),
    "batch norm of images": lambda net, **of: nn.BatchNorm2d(**of),
    "group norm": lambda net, **of: nn.GroupNorm(**of),
    "conv2d": lambda net, **of: nn.Conv2d(**of),
    "conv1d": lambda net, **of: nn.Conv1d(**of),
    "transposed conv": lambda net, **of: nn.ConvTranspose2d(**of),
    "gru": lambda net, **of: nn.GRU(batch_first=True, **of),
    "lstm": lambda net, **of: nn.LSTM(batch_first=True, **of),
    "rnn": lambda net, **of: nn.RNN(batch_first=True, **of),
    "gru cell": lambda net, **of: nn.GRUCell(**of),
    "attention": lambda net, **of: nn.MultiheadAttention(batch_first=True, **of),
    "embedding": lambda net, **of: nn.Embedding(VOCABULARY, **of),
    "lookup": lambda net, **of: nn.Embedding(VOCABULARY, **of),
    "bag": lambda net, **of: nn.EmbeddingBag(VOCABULARY, **of),
    "scale": lambda net, shape: nn.Parameter(torch.rand(shape) + 0.5),
    "matrix": lambda net, shape: nn.Parameter(torch.randn(shape) / shape[0] ** 0.5),
    "activation": lambda net, name: ACTIVATIONS[name](),
}


# -- how they run --------------------------------------------------------------------------------


def _call(place: Place, x: Tensor) -> Tensor:
    module = place.module
    return module(x.double()).to(x.dtype) if place.options.get("wide") else module(x)


def _attention(place: Place, x: Tensor) -> Tensor:
    memory = x.flip(1) if place.options["memory"] else x
    y, weights = place.module(x, memory, memory, need_weights=place.options["weights"])
    return y if weights is None else y + weights.sum(-1, keepdim=True)


def _cell(place: Place, x: Tensor) -> Tensor:
    h, outputs = None, []
    for t in range(x.shape[1]):
        h = place.module(x[:, t], h)
        outputs.append(h)
    return torch.stack(outputs, 1)


def _recurrent(place: Place, x: Tensor) -> Tensor:
    y, last = place.module(x)
    if not place.options["last"]:
        return y
    last = last[0] if isinstance(last, tuple) else last
    return y + last.sum() / 10


def _penalty(place: Place, x: Tensor) -> Tensor:
    if place.pick.on:
        place.penalties.append((place.other.weight**2).sum() / 10)
    return x


def _peek(place: Place, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = place.other(x)
    return x + y.mean(-1, keepdim=True)


def _keep(place: Place, x: Tensor) -> Tensor:
    place.kept[place.index] = x
    return x


def _bag(place: Place, x: Tensor) -> Tensor:
    ids = (x > 0).cumsum(-1) % VOCABULARY
    return x + place.module(ids.view(-1, ids.shape[-1])).view_as(x)


def _grid(place: Place, x: Tensor) -> Tensor:
    return x[:, :, None, None].expand(*x.shape, *place.options["size"])


RUN: dict[str, Callable[[Place, Tensor], Tensor]] = {
    "attention": _attention,
    "gru cell": _cell,
    "gru": _recurrent,
    "lstm": _recurrent,
    "rnn": _recurrent,
    "penalty": _penalty,
    "peek": _peek,
    "keep": _keep,
    "add": lambda place, x: x + place.kept[place.options["node"]],
    "again": lambda place, x: place.other(x),
    "transposed use": lambda place, x: F.linear(x, place.other.weight.t().to(x.dtype)),
    "branch": lambda place, x: x + place.module(x) if place.pick.on else x,
    "checkpoint": lambda place, x: checkpoint(place.module, x, use_reentrant=False),
    "bilinear": lambda place, x: place.module(x, x.tanh()),
    "conv1d": lambda place, x: place.module(x.transpose(1, 2)).transpose(1, 2),
    "lookup": lambda place, x: x + place.module((x > 0).sum(-1) % VOCABULARY),
    "bag": _bag,
    "scale": lambda place, x: x * place.module,
    "matrix": lambda place, x: x @ place.module,
    "mean": lambda place, x: x.mean(1),
    "last": lambda place, x: x[:, -1],
    "flatten": lambda place, x: x.flatten(1),
    "repeat": lambda place, x: x[:, None].expand(-1, place.options["length"], -1),
    "grid": _grid,
    "detach": lambda place, x: x.detach(),
}
