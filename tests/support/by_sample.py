"""Models and batches whose samples can be taken one by one, and the gradient of each so found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cases import Branches, mlp, relative_error

Gradients = dict[str, Tensor]


@dataclass
class SampleCase:
    """A model and the batch of each site; the first dimension counts samples."""

    model: nn.Module
    batches: Sequence[Tensor]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over the samples."""
    y = model(x)
    return y.square().mean() + y.sin().mean()


def by_sample(case: SampleCase, site: int) -> list[Gradients]:
    """What each sample adds to the gradient of its site, in float64, by plain autograd."""
    model, x = copy.deepcopy(case.model).double(), case.batches[site]
    x = x.double() if x.is_floating_point() else x
    found = []
    for one in x.split(1):
        model.zero_grad()
        (loss_of(model, one) / len(x)).backward()
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in params.items()}
        found.append({name: g.clone() for name, g in grads.items()})
    return found


def total(parts: Sequence[Gradients]) -> Gradients:
    """The sum."""
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def length(gradients: Gradients) -> float:
    """The norm over all parameters."""
    return float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())


def check_close(found: Gradients, wanted: Gradients) -> None:
    """Checks gradients by parameter; those that are next to nothing by their absolute error."""
    whole = length(wanted)
    assert whole > 0
    for name, g in wanted.items():
        if name not in found:
            assert not g.any(), f"{name!r} has no gradient"
            continue
        near = float((found[name].double() - g).norm()) < 1e-6 * whole
        assert near or relative_error(found[name], g) < 1e-5, name


def times(factor: float, gradients: Gradients) -> Gradients:
    """So many times the gradients."""
    return {name: factor * g for name, g in gradients.items()}


def floats(*shape: int, counts: Sequence[int] = (5, 3)) -> list[Tensor]:
    """A batch per site."""
    return [torch.randn(n, *shape) for n in counts]


def ids(*shape: int, counts: Sequence[int] = (5, 3)) -> list[Tensor]:
    """Ids below 20, of which many are equal; 0 is padding."""
    return [torch.randint(0, 20, (n, *shape)) // 3 for n in counts]


def wide() -> SampleCase:
    """Factors are fewer bytes than the gradient."""
    return SampleCase(mlp(40, 48, 32), floats(40))


def linear() -> SampleCase:
    """On one row per sample."""
    return SampleCase(mlp(6, 7, 8, 5), floats(6))


def positions() -> SampleCase:
    """On several rows per sample, more in the second than pay to be compared one by one."""
    forward = lambda m, x: m.last(m.first(x).tanh().repeat(1, 4, 1))  # noqa: E731
    model = Branches(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 4, bias=False))
    return SampleCase(model, floats(3, 6))


def conv() -> SampleCase:
    """With groups, in one dimension and in two."""
    forward = lambda m, x: m.line(m.group(m.first(x).tanh()).flatten(2))  # noqa: E731
    layers = {
        "first": nn.Conv2d(2, 4, 3, padding=1),
        "group": nn.Conv2d(4, 6, 3, stride=2, groups=2),
        "line": nn.Conv1d(6, 3, 2),
    }
    return SampleCase(Branches(forward, **layers), floats(2, 7, 7))


def embedding() -> SampleCase:
    """Of ids that several samples have, and that one has several times; one is padding."""
    model = nn.Sequential(nn.Embedding(20, 6, padding_idx=0), nn.Flatten(), nn.Linear(24, 4))
    return SampleCase(model, ids(4))


def bags() -> SampleCase:
    """Means of ids that several samples have, and that one has several times; one is padding."""
    model = nn.Sequential(nn.EmbeddingBag(20, 6, padding_idx=0), nn.Linear(6, 4))
    return SampleCase(model, ids(4))


def tied() -> SampleCase:
    """An embedding and a head of one table: two products whose sum is the gradient."""
    embed, head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
    head.weight = embed.weight
    model = Branches(lambda m, x: m.head(m.embed(x).tanh()), embed=embed, head=head)
    return SampleCase(model, ids(3))


def tied_bias() -> SampleCase:
    """Two layers with one bias."""
    model = mlp(6, 7, 7)
    model[2].bias = model[0].bias
    return SampleCase(model, floats(6))


def used_twice() -> SampleCase:
    """A layer whose uses add up for each sample."""
    forward = lambda m, x: m.layer(m.layer(x).tanh()) + m.layer(x[:, :1]).sum(1, True)  # noqa: E731
    return SampleCase(Branches(forward, layer=nn.Linear(6, 6)), floats(3, 6))


def attention() -> SampleCase:
    """To itself."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return SampleCase(Branches(lambda m, x: m.layer(x, x, x)[0], layer=layer), floats(4, 8))


class _SequenceFirst(nn.Module):
    """Is called with samples first, and calls its layer with them second."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        arguments = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.layer(*arguments)[0].transpose(0, 1)


def sequence_first(layer: nn.Module) -> SampleCase:
    """A layer whose second dimension counts samples."""
    return SampleCase(_SequenceFirst(layer), floats(4, 8))


def cell() -> SampleCase:
    """Over several steps in time."""

    def forward(m: Branches, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = m.layer(x[:, t], state)
        return state

    return SampleCase(Branches(forward, layer=nn.GRUCell(8, 5)), floats(4, 8))


def norms() -> SampleCase:
    """Of three kinds, the last with its weight frozen."""
    model = nn.Sequential(
        nn.LayerNorm(6),
        nn.Linear(6, 8),
        nn.RMSNorm(8),
        nn.Unflatten(2, (4, 2)),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    model[4].weight.requires_grad_(False)
    return SampleCase(model, floats(3, 6))


class Tokens(nn.Module):
    """A token of all samples before theirs, a table of positions, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 4, 8))
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), self.layer(x)], dim=1)
        return self.norm(self.scale * (tokens + self.places)).sin()


class _Checkpointed(nn.Module):
    """Computes a model again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def tied_norms() -> nn.Module:
    """Two norms of one weight, which is also the bias of a layer."""
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 7), nn.LayerNorm(7))
    model[3].weight = model[1].weight
    model[2].bias = model[1].weight
    return model


def bias_alone() -> SampleCase:
    """Layers whose biases alone are trained."""
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Tanh(), nn.Linear(5, 4))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    return SampleCase(model, floats(3, 6))


def positions_of_all() -> SampleCase:
    """Positions that all samples share, looked up in a table; as many as samples of a site."""

    def forward(m: Branches, x: Tensor) -> Tensor:
        return m.head(m.ids(x).tanh() + m.places(torch.arange(x.shape[1])))

    layers = {"ids": nn.Embedding(20, 6), "places": nn.Embedding(5, 6), "head": nn.Linear(6, 20)}
    layers["head"].weight = layers["ids"].weight
    return SampleCase(Branches(forward, **layers), ids(5))


def checkpointed() -> SampleCase:
    """Computed again in backward."""
    forward = lambda m, x: m.last(checkpoint(m.body, x, use_reentrant=False))  # noqa: E731
    model = Branches(forward, body=mlp(6, 7, 8), last=nn.Linear(8, 4))
    return SampleCase(model, floats(3, 6))


def frozen() -> SampleCase:
    """Without gradients in its norm and its first layer."""
    model = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return SampleCase(model, floats(6))


def used_by_one() -> SampleCase:
    """With a layer that no site uses, and one that the second alone does."""

    def forward(m: Branches, x: Tensor) -> Tensor:
        y = m.first(x)
        return m.second(y).relu() + y if float(x[0, 0]) > 50 else y

    layers = {name: nn.Linear(6, 6) for name in ("first", "second", "third")}
    batches = floats(6)
    batches[1][:, 0] += 100
    return SampleCase(Branches(forward, **layers), batches)


CASES: dict[str, Callable[[], SampleCase]] = {
    "wide": wide,
    "linear": linear,
    "positions": positions,
    "conv": conv,
    "embedding": embedding,
    "bags": bags,
    "tied": tied,
    "tied bias": tied_bias,
    "used twice": used_twice,
    "attention": lambda: sequence_first(nn.MultiheadAttention(8, 2)),
    "attention, batch first": attention,
    "gru, two directions": lambda: sequence_first(nn.GRU(8, 4, 2, bidirectional=True)),
    "lstm with projection": lambda: sequence_first(nn.LSTM(8, 5, proj_size=4)),
    "cell": cell,
    "norms": norms,
    "norm, tied": lambda: SampleCase(tied_norms(), floats(6)),
    "tokens": lambda: SampleCase(Tokens(), floats(3, 6)),
    "tokens, checkpointed": lambda: SampleCase(_Checkpointed(Tokens()), floats(3, 6)),
    "positions of all": positions_of_all,
    "bias alone": bias_alone,
    "checkpointed": checkpointed,
    "frozen": frozen,
    "used by one": used_by_one,
}


def built() -> dict[str, SampleCase]:
    """The cases, always with the same numbers."""
    found = {}
    for name, make in CASES.items():
        torch.manual_seed(3)
        found[name] = make()
    return found
