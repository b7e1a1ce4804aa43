"""Models and batches of every kind that outergrad must share exactly.

A case is a model and, per site, what is fed to it; `loss` is the mean that a user would take.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import outergrad as og
from covering import LONG
from seeding import seed

METHODS: dict[str, Any] = {
    "dense": og.Dense(),
    "dad": og.DAD(),
    "dad raw": og.DAD(reveal="activations"),
    "dad forced": og.DAD(always=True),
    "dad raw forced": og.DAD(always=True, reveal="activations"),
    "edad forced": og.EDAD(always=True),
    "edad raw forced": og.EDAD(always=True, inputs="raw"),
    "rank-dad, full rank": og.RankDAD(rank=1000),
    "powersgd, full rank": og.PowerSGD(rank=1000),
    "dad forced, small buckets": og.DAD(always=True, bucket_bytes=1),
    "sparse, all entries": og.Sparse(density=1.0, always=True),
    "sparse, all added up": og.Sparse(density=1.0, select="random", always=True),
}

EVERY: dict[str, Any] = METHODS | {"auto": og.Auto()}
"""And the policy that chooses, which a mesh refuses."""

KINDS = [
    ["dad forced", "dad raw forced", "dad forced, small buckets"],
    ["edad forced", "edad raw forced"],
    ["rank-dad, full rank"],
    ["powersgd, full rank", "sparse, all entries", "sparse, all added up"],
    ["dense", "dad", "dad raw", "auto"],
]
"""All of them, those side by side that make the same of a layer: factors; factors without deltas;
factors of low rank; parts of the gradient; and what pays best, which is dense in small layers."""


def in_turn(number: int) -> dict[str, Any]:
    """A method of each kind, another for the next number; with OUTERGRAD_LONG=1 all methods."""
    labels = EVERY if LONG else [kind[number % len(kind)] for kind in KINDS]
    return {label: EVERY[label] for label in labels}


SHARED_STREAM = {"attention dropout", "attention dropout, no weights", "transformer"}
"""Cases with dropout: ranks in threads share one random stream and would draw other numbers."""


@dataclass
class Case:
    """A model and the batches of four sites."""

    model: nn.Module
    batches: Sequence[tuple[Any, ...]]
    loss: Callable[..., Tensor] = lambda y: (y * y).mean() + y.sin().mean()
    context: Callable[[], Any] | None = None
    factors: tuple[str, ...] = field(default=())
    """Parameters that must travel as factors when forced."""


def pooled(case: Case, sites: int) -> dict[str, Tensor | None]:
    """Mean over sites of the local gradients, in float64, without any of our code."""
    model = copy.deepcopy(case.model).double()
    for batch in case.batches[:sites]:
        seed(7)
        (run(model, case, to_double(batch)) / sites).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def run(model: nn.Module, case: Case, batch: tuple[Any, ...]) -> Tensor:
    """Forward and loss."""
    y = model(*batch)
    return case.loss(y[0] if isinstance(y, tuple) else y)


def to_double(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floating tensors in float64."""
    is_float = [isinstance(t, Tensor) and t.is_floating_point() for t in batch]
    return tuple(t.double() if f else t for t, f in zip(batch, is_float, strict=True))


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """Frobenius norm of the difference over that of the expected."""
    if expected is None or found is None:
        return 0.0 if found is expected else float("inf")
    scale = expected.norm().item()
    return (found.double() - expected).norm().item() / (scale or 1.0)


def rows(*shape: int, counts: Sequence[int] = (5, 3, 7, 4)) -> list[tuple[Tensor]]:
    """A batch per site, of different sizes."""
    return [(torch.randn(count, *shape),) for count in counts]


def sequences(counts: Sequence[int] = (5, 3, 7, 4)) -> list[tuple[Tensor]]:
    """Ids below 20; 0 is padding."""
    return [(torch.randint(0, 20, (count, 6)),) for count in counts]


class Branches(nn.Module):
    """Holds several layers for cases that need a forward of their own."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | nn.Parameter):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


class Events(list):
    """A recorder that keeps all it is told."""

    record = list.append

    @property
    def layers(self):
        return [event for event in self if isinstance(event, og.events.Layer)]


class Boom(torch.autograd.Function):
    """The identity, whose backward raises when told to."""

    armed: bool = False

    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, delta):
        if ctx.armed:
            raise ArithmeticError("boom")
        return delta, None


def mlp(*widths: int, inplace: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=inplace)]
    return nn.Sequential(*layers[:-1])


def conv(kind: type[nn.Module], *args: Any, size: int = 8, **kwargs: Any) -> Case:
    """A convolution on square inputs of 4 channels."""
    dimensions = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kind]
    layer = kind(*args, **kwargs)
    batches = rows(4, *[size] * dimensions, counts=(2, 1, 3, 2))
    return Case(layer, batches, factors=("weight",))


def attention(inputs: str = "self", call: dict[str, Any] | None = None, **kwargs: Any) -> Case:
    """Multi-head attention of width 8 with 2 heads."""
    options = {"dropout": 0.0, "batch_first": True, **kwargs}
    layer = nn.MultiheadAttention(8, 2, **options)
    key_width, value_width = kwargs.get("kdim") or 8, kwargs.get("vdim") or 8

    def forward(self: Branches, x: Tensor, memory: Tensor, values: Tensor) -> Tensor:
        arguments = {"self": (x, x, x), "memory": (x, memory, memory), "all": (x, memory, values)}
        y, weights = self.layer(*arguments[inputs], **_masks(call or {}, x))
        return y if weights is None else torch.cat([y.flatten(), 3 * weights.flatten()])

    batches = [
        (torch.randn(n, 5, 8), torch.randn(n, 5, key_width), torch.randn(n, 5, value_width))
        for n in (2, 3, 1, 2)
    ]
    if not options["batch_first"]:
        batches = [tuple(t.transpose(0, 1) for t in batch) for batch in batches]
    return Case(Branches(forward, layer=layer), batches, factors=("layer.out_proj.weight",))


def _masks(call: dict[str, Any], x: Tensor) -> dict[str, Any]:
    made = {k: v for k, v in call.items() if k not in ("causal", "padding", "float_mask")}
    if "causal" in call:
        made["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if "float_mask" in call:
        made["attn_mask"] = torch.linspace(-1, 1, x.shape[0] * 2 * 25).view(-1, 5, 5).to(x.dtype)
    if "padding" in call:
        padding = torch.arange(5).expand(x.shape[0], 5) >= 3
        made["key_padding_mask"] = padding if "float_mask" not in call else padding.to(x.dtype)
    return made


def cell(kind: type[nn.RNNCellBase], *, given: bool = False, **kwargs: Any) -> Case:
    """A recurrent cell over four steps in time, from zeros or from a state that is given."""

    def forward(self: Branches, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        state = (h, c) if kind is nn.LSTMCell else h
        state, outputs = state if given else None, []
        for t in range(4):
            state = self.layer(x[..., t, :], state)
            outputs.append(torch.cat(state, -1) if isinstance(state, tuple) else state)
        return torch.cat(outputs)

    shapes = [(4, 6)] * 4 if kwargs.pop("unbatched", False) else [(n, 4, 6) for n in (3, 2, 5, 1)]
    batches = [
        (torch.randn(shape), torch.randn(*shape[:-2], 5), torch.randn(*shape[:-2], 5))
        for shape in shapes
    ]
    model = Branches(forward, layer=kind(6, 5, **kwargs))
    return Case(model, batches, factors=("layer.weight_ih", "layer.weight_hh"))


def recurrent(
    kind: type[nn.RNNBase],
    lengths: Sequence[int] = (),
    *,
    given: bool = False,
    unbatched: bool = False,
    **kwargs: Any,
) -> Case:
    """A recurrent layer over four steps in time, whose last states count as the output does.

    With lengths the sequences are packed; the first states are zeros unless they are given.
    """
    layer = kind(6, 5, **kwargs)

    def forward(self: Branches, x: Tensor, *states: Tensor) -> Tensor:
        sequences = x
        if lengths:
            used = lengths[: x.shape[1]]
            sequences = pack_padded_sequence(x, used, self.layer.batch_first, enforce_sorted=False)
        hx = states if isinstance(self.layer, nn.LSTM) else states[0]
        y, last = self.layer(sequences, hx if given else None)
        y = y.data if isinstance(y, PackedSequence) else y
        return torch.cat([t.flatten() for t in (y, *last)])

    shapes = [(4,)] * 4 if unbatched else [(4, n) for n in (3, 2, 5, 1)]
    widths = layer.proj_size or 5, 5
    batches = [
        (
            torch.randn(*(reversed(shape) if layer.batch_first else shape), 6),
            *(torch.randn(len(layer.all_weights), *shape[1:], width) for width in widths),
        )
        for shape in shapes
    ]
    weights = [f"layer.{name}" for name, _ in layer.named_parameters() if "weight" in name]
    return Case(Branches(forward, layer=layer), batches, factors=tuple(weights))


def tied() -> Case:
    """Embedding and head of one table."""
    embed, head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
    head.weight = embed.weight
    return Case(
        Branches(lambda m, ids: m.head(torch.tanh(m.embed(ids))), embed=embed, head=head),
        sequences(),
    )


def bag_of_weights() -> Case:
    """A bag by offsets, one of them empty, with weights that are trained, too; tied to a head."""

    def forward(self: Branches, ids: Tensor, starts: Tensor) -> Tensor:
        pooled = self.bag(ids, starts, per_sample_weights=self.weigh(ids).flatten())
        return self.head(pooled.tanh())

    bag = nn.EmbeddingBag(20, 6, mode="sum", include_last_offset=True, padding_idx=3)
    layers = {"bag": bag, "weigh": nn.Embedding(20, 1), "head": nn.Linear(6, 20, bias=False)}
    layers["head"].weight = bag.weight
    batches = [
        (torch.randint(0, 20, (count,)), torch.tensor([0, 2, 2, count])) for count in (9, 4, 12, 7)
    ]
    return Case(Branches(forward, **layers), batches)


def transformer() -> Case:
    """An encoder and a decoder layer of PyTorch."""
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
    batches = [(torch.randn(n, 4, 8), torch.randn(n, 3, 8)) for n in (2, 3, 1, 2)]
    return Case(model, batches)


def only_on_site_0() -> Case:
    """A branch that only rank 0 uses; another that nobody does."""

    def forward(self: Branches, x: Tensor, extra: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if bool(extra) else y

    layers = {name: nn.Linear(6, 6) for name in ("first", "second", "third")}
    batches = [(x, torch.tensor(i == 0)) for i, (x,) in enumerate(rows(6))]
    return Case(Branches(forward, **layers, norm=nn.LayerNorm(6)), batches)


def frozen() -> Case:
    model = mlp(6, 7, 8, 5)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return Case(model, rows(6), factors=("4.weight",))


def weight_norm() -> Case:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 4))
    return Case(model, rows(6), factors=("1.weight",))


def penalty() -> Case:
    """Weights that the loss also reaches outside their layer."""
    forward = lambda m, x: torch.cat([m.layer(x).flatten(), m.layer.weight.flatten()])  # noqa: E731
    return Case(Branches(forward, layer=nn.Linear(6, 5), head=nn.Linear(5, 2)), rows(6))


def penalty_on_one_site() -> Case:
    def forward(self: Branches, x: Tensor, on: Tensor) -> Tensor:
        y = self.layer(x).flatten()
        return torch.cat([y, self.layer.weight.flatten()]) if bool(on) else y

    batches = [(x, torch.tensor(i == 1)) for i, (x,) in enumerate(rows(6))]
    return Case(Branches(forward, layer=nn.Linear(6, 5)), batches)


class OwnForward(nn.Linear):
    """A subclass whose forward is not Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


def checkpointed() -> Case:
    def forward(self: Branches, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)

    body = nn.Sequential(mlp(6, 12, 12, inplace=True), nn.LayerNorm(12), nn.Linear(12, 5))
    return Case(Branches(forward, body=body), rows(6), factors=("body.0.0.weight",))


def plain_parameters() -> Case:
    forward = lambda m, x: m.layer(x + m.shift) * m.scale  # noqa: E731
    layers = {"layer": nn.Linear(6, 5), "shift": nn.Parameter(torch.randn(6))}
    return Case(Branches(forward, **layers, scale=nn.Parameter(torch.tensor(1.5))), rows(6))


class Standardised(nn.Conv2d):
    """Computes with another weight than its parameter."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


def build() -> dict[str, Callable[[], Case]]:
    """Every case by name; built when called, after a seed."""
    linear = {
        "linear": lambda: Case(mlp(12, 20, 15, 6), rows(12), factors=("0.weight", "2.weight")),
        "linear without bias": lambda: Case(nn.Linear(9, 8, bias=False), rows(9)),
        "linear 4-D": lambda: Case(mlp(6, 8, 5), rows(2, 3, 6)),
        "linear 1-D": lambda: Case(mlp(6, 8, 5), [(torch.randn(6),) for _ in range(4)]),
        "linear wide": lambda: Case(nn.Linear(40, 3), rows(40)),
        "linear many rows": lambda: Case(mlp(6, 4, 3), rows(6, counts=(50, 30, 70, 40))),
        "no rows on one site": lambda: Case(
            mlp(6, 7, 5), rows(6, counts=(4, 0, 3, 0)), loss=lambda y: (y * y).sum() / 10
        ),
        "in-place activation": lambda: Case(mlp(6, 9, 8, 5, inplace=True), rows(3, 6)),
        "called several times": lambda: Case(
            Branches(
                lambda m, x: m.layer(torch.tanh(m.layer(x))) + m.layer(x), layer=nn.Linear(6, 6)
            ),
            rows(6),
            factors=("layer.weight",),
        ),
        "expanded delta": lambda: Case(nn.Linear(6, 5), rows(6), loss=lambda y: y.sum()),
        "rank-deficient": lambda: Case(
            mlp(6, 7, 5), [(torch.randn(1, 6).expand(5, 6).contiguous(),) for _ in range(4)]
        ),
    }
    convolution = {
        "conv1d": lambda: conv(nn.Conv1d, 4, 6, 3),
        "conv2d": lambda: conv(nn.Conv2d, 4, 6, 3, padding=1),
        "conv2d strided": lambda: conv(nn.Conv2d, 4, 6, (3, 2), stride=(2, 3), padding=(1, 0)),
        "conv2d dilated": lambda: conv(nn.Conv2d, 4, 6, 3, dilation=2, bias=False),
        "conv2d same": lambda: conv(nn.Conv2d, 4, 6, (5, 3), padding="same"),
        "conv2d same dilated": lambda: conv(nn.Conv2d, 4, 6, 4, padding="same", dilation=2),
        "conv2d reflect": lambda: conv(nn.Conv2d, 4, 6, 3, padding=2, padding_mode="reflect"),
        "conv2d circular": lambda: conv(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"),
        "conv2d replicate same": lambda: conv(
            nn.Conv2d, 4, 6, 4, padding="same", padding_mode="replicate"
        ),
        "conv2d groups": lambda: conv(nn.Conv2d, 4, 6, 3, groups=2, stride=2),
        "conv2d depthwise": lambda: conv(nn.Conv2d, 4, 8, 3, groups=4, padding=1),
        "conv3d": lambda: conv(nn.Conv3d, 4, 3, 3, size=5, padding=1, stride=2),
        "conv unbatched": lambda: Case(
            nn.Conv2d(4, 6, 3), [(torch.randn(4, 6, 6),) for _ in range(4)]
        ),
        "conv as linear": lambda: conv(nn.Conv2d, 4, 40, 8),
        "conv channels last": lambda: Case(
            nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), rows(4, 8, 8)
        ),
    }
    embedding = {
        "embedding": lambda: Case(nn.Embedding(20, 6), sequences(), factors=("weight",)),
        "embedding padding": lambda: Case(nn.Embedding(20, 6, padding_idx=0), sequences()),
        "embedding by frequency": lambda: Case(
            nn.Embedding(20, 6, scale_grad_by_freq=True), sequences()
        ),
        "embedding twice": lambda: Case(
            Branches(lambda m, ids: m.e(ids) * m.e(19 - ids), e=nn.Embedding(20, 6)), sequences()
        ),
        "bag": lambda: Case(nn.EmbeddingBag(20, 6), sequences(), factors=("weight",)),
        "bag sum": lambda: Case(nn.EmbeddingBag(20, 6, mode="sum", padding_idx=0), sequences()),
        "bag max": lambda: Case(nn.EmbeddingBag(20, 6, mode="max"), sequences()),
        "bag offsets": lambda: bag_of_weights(),
        "bag by frequency": lambda: Case(
            nn.EmbeddingBag(20, 6, scale_grad_by_freq=True), sequences()
        ),
        "tied": tied,
    }
    heads = {
        "attention": lambda: attention(),
        "attention without weights": lambda: attention(call={"need_weights": False}),
        "attention per head": lambda: attention(call={"average_attn_weights": False}),
        "attention time first": lambda: attention(batch_first=False),
        "attention to memory": lambda: attention("memory", call={"need_weights": False}),
        "attention to memory and values": lambda: attention("all"),
        "attention kdim vdim": lambda: attention("all", kdim=6, vdim=10),
        "attention causal": lambda: attention(call={"causal": 1, "is_causal": True}),
        "attention padding": lambda: attention(call={"padding": 1, "need_weights": False}),
        "attention float mask": lambda: attention(call={"float_mask": 1, "padding": 1}),
        "attention bias_kv": lambda: attention(
            call={"causal": 1, "padding": 1}, add_bias_kv=True, add_zero_attn=True
        ),
        "attention without bias": lambda: attention("all", bias=False),
        "attention dropout": lambda: attention(dropout=0.4),
        "attention dropout, no weights": lambda: attention(
            dropout=0.4, call={"need_weights": False}
        ),
        "attention unbatched": lambda: Case(
            Branches(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2)),
            [(torch.randn(5, 8),) for _ in range(4)],
        ),
        "transformer": transformer,
    }
    cells = {
        "rnn cell": lambda: cell(nn.RNNCell),
        "rnn cell relu": lambda: cell(nn.RNNCell, nonlinearity="relu", given=True),
        "gru cell": lambda: cell(nn.GRUCell),
        "gru cell without bias": lambda: cell(nn.GRUCell, given=True, bias=False),
        "lstm cell": lambda: cell(nn.LSTMCell),
        "lstm cell unbatched": lambda: cell(nn.LSTMCell, given=True, unbatched=True),
    }
    layers_in_time = {
        "rnn relu": lambda: recurrent(nn.RNN, nonlinearity="relu", num_layers=2),
        "rnn unbatched": lambda: recurrent(nn.RNN, unbatched=True, given=True, bias=False),
        "gru": lambda: recurrent(nn.GRU, batch_first=True),
        "gru both ways": lambda: recurrent(nn.GRU, given=True, num_layers=2, bidirectional=True),
        "gru packed": lambda: recurrent(nn.GRU, (2, 4, 1, 4, 3), given=True),
        "lstm": lambda: recurrent(nn.LSTM, given=True, batch_first=True, bias=False),
        "lstm packed both ways": lambda: recurrent(
            nn.LSTM, (2, 4, 1, 4, 3), num_layers=2, bidirectional=True
        ),
        "lstm projected": lambda: recurrent(
            nn.LSTM, (4, 4, 3, 2, 1), proj_size=3, num_layers=2, given=True
        ),
    }
    others = {
        "frozen": frozen,
        "unused": only_on_site_0,
        "weight_norm": weight_norm,
        "penalty on weights": penalty,
        "penalty on one site": penalty_on_one_site,
        "forward of its own": lambda: Case(
            nn.Sequential(OwnForward(6, 5), nn.Linear(5, 4)), rows(6), factors=("1.weight",)
        ),
        "convolution of its own": lambda: Case(Standardised(4, 6, 3), rows(4, 6, 6)),
        "keyword input": lambda: Case(
            Branches(lambda m, x: m.layer(input=x), layer=nn.Linear(6, 5)), rows(6)
        ),
        "checkpointing": checkpointed,
        "plain parameters": plain_parameters,
        "no rule": lambda: Case(
            Branches(lambda m, x: m.layer(x, x), layer=nn.Bilinear(6, 6, 5)), rows(4, 6)
        ),
        "transposed convolution": lambda: Case(nn.ConvTranspose2d(4, 3, 3), rows(4, 5, 5)),
        "batch norm": lambda: Case(
            nn.Sequential(
                nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(96, 5)
            ),
            rows(4, 6, 6),
        ),
        "two dtypes": lambda: Case(
            Branches(
                lambda m, x: m.b(m.a(x).double()).to(x.dtype),
                a=nn.Linear(6, 5),
                b=nn.Linear(5, 4).double(),
            ),
            rows(6),
        ),
    }
    return {**linear, **convolution, **embedding, **heads, **cells, **layers_in_time, **others}
