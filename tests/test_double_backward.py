"""Gradients of inputs that are part of the loss: penalties, forces, differential equations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import METHODS, Branches, Case, pooled, relative_error, rows, run, sequences
from ranks import run_on_lasting_groups

STEPS = 3
"""The first with taps; in the ones after it the weights travel dense."""


def slope(y: Tensor, *inputs: Tensor) -> Tensor:
    """The gradients of a sum, with their graph, as a vector."""
    found = torch.autograd.grad(y.sum(), inputs, create_graph=True)
    return torch.cat([g.flatten() for g in found])


def penalised(critic: nn.Module, *shape: int) -> Case:
    """WGAN-GP: the critic's values, and how far its slopes are from 1 between two inputs."""

    def forward(self: Branches, x: Tensor) -> Tensor:
        between = (x * 0.3 + x.flip(0) * 0.7).requires_grad_()
        g = slope(self.critic(between), between).view(len(x), -1)
        return torch.cat([self.critic(x).flatten(), 10 * (g.norm(dim=1) - 1) ** 2])

    return Case(Branches(forward, critic=critic), rows(*shape), loss=lambda y: y.mean())


def sloped(layer: nn.Module, *shape: int, call: Callable[..., Tensor] | None = None) -> Case:
    """R1: the squared slopes of a layer and of a head, besides what they return."""

    def forward(self: Branches, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = (call or (lambda layer, x: layer(x)))(self.layer, x)
        return torch.cat([y.flatten(), (slope(torch.tanh(y).exp(), x) ** 2).sum()[None]])

    return Case(Branches(forward, layer=layer), rows(*shape))


def force_field() -> Case:
    """Energies and forces of atoms of several kinds."""

    def forward(self: Branches, kinds: Tensor, places: Tensor) -> Tensor:
        places = places.clone().requires_grad_()
        far = ((places.unsqueeze(2) - places.unsqueeze(1)) ** 2).sum(-1, keepdim=True)
        h = self.kinds(kinds)
        h = h + (self.messages(torch.exp(-far)) * h.unsqueeze(-2)).sum(-2)
        energy = self.energy(h)
        return torch.cat([energy.flatten(), slope(energy, places)])

    layers = {"messages": nn.Sequential(nn.Linear(1, 9), nn.SiLU(), nn.Linear(9, 7))}
    layers["energy"] = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 1))
    places = rows(6, 3)
    batches = [(ids, place) for (ids,), (place,) in zip(sequences(), places, strict=True)]
    return Case(Branches(forward, kinds=nn.Embedding(20, 7), **layers), batches)


def physics_informed() -> Case:
    """The residual of a differential equation with a second derivative."""

    def forward(self: Branches, t: Tensor) -> Tensor:
        t = t.clone().requires_grad_()
        u = self.net(t)
        u_t = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        return slope(u_t, t) + 4 * u.flatten() + u_t.flatten()

    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    return Case(Branches(forward, net=net), rows(1))


def by_embeddings() -> Case:
    """The slopes of a text model at its embeddings."""

    def forward(self: Branches, ids: Tensor) -> Tensor:
        e = self.table(ids)
        y = self.head(e.flatten(1))
        return torch.cat([y.flatten(), slope(y.exp(), e)])

    head = nn.Sequential(nn.Linear(36, 9), nn.GELU(), nn.Linear(9, 2))
    return Case(Branches(forward, table=nn.Embedding(20, 6), head=head), sequences())


def reused() -> Case:
    layer = nn.Linear(6, 6)
    return sloped(layer, 6, call=lambda layer, x: layer(torch.tanh(layer(x))) + layer(x).sin())


def checkpointed() -> Case:
    body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    return sloped(body, 6, call=lambda body, x: checkpoint(body, x, use_reentrant=False))


def half_frozen() -> Case:
    body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))
    body[2].requires_grad_(False)
    return sloped(body, 6)


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 20), nn.LeakyReLU(0.2), nn.Linear(20, 15), nn.LayerNorm(15)),
        *(nn.LeakyReLU(0.2, inplace=True), nn.Linear(15, 1)),
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(6, 8, 3, groups=2, padding=1, padding_mode="reflect"), nn.LeakyReLU(0.2)),
        *(nn.Flatten(), nn.Linear(8 * 16, 1)),
    )


def attend(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    return layer(x, x, x)[0]


def recur(layer: nn.RNNBase, x: Tensor) -> Tensor:
    y, last = layer(x)
    last = last if isinstance(last, tuple) else (last,)
    return torch.cat([t.flatten() for t in (y, *last)])


def through_cell(layer: nn.RNNCellBase, x: Tensor) -> Tensor:
    h = layer(x[:, 0])
    h = layer(x[:, 1], h)
    return h[0] if isinstance(h, tuple) else h


CASES: dict[str, Callable[[], Case]] = {
    "critic": lambda: penalised(perceptron(), 6),
    "convolutional critic": lambda: penalised(convolutional(), 3, 8, 8),
    "critic of one layer": lambda: penalised(nn.Linear(6, 1), 6),
    "critic with weight norm": lambda: penalised(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 1)), 6
    ),
    "linear 4-D": lambda: sloped(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), 2, 6),
    "conv1d": lambda: sloped(nn.Conv1d(4, 6, 3, dilation=2), 4, 9),
    "conv3d": lambda: sloped(nn.Conv3d(2, 3, 2, stride=2, padding=1), 2, 4, 4, 4),
    "force field": force_field,
    "physics-informed": physics_informed,
    "by embeddings": by_embeddings,
    "reused": reused,
    "checkpointed": checkpointed,
    "half frozen": half_frozen,
    "attention": lambda: sloped(nn.MultiheadAttention(8, 2, batch_first=True), 5, 8, call=attend),
    "rnn cell": lambda: sloped(nn.RNNCell(6, 5), 2, 6, call=through_cell),
    "gru cell": lambda: sloped(nn.GRUCell(6, 5), 2, 6, call=through_cell),
    "lstm cell": lambda: sloped(nn.LSTMCell(6, 5), 2, 6, call=through_cell),
    "rnn": lambda: sloped(nn.RNN(6, 5, num_layers=2, batch_first=True), 4, 6, call=recur),
    "gru": lambda: sloped(nn.GRU(6, 5, bidirectional=True, batch_first=True), 4, 6, call=recur),
    "lstm": lambda: sloped(nn.LSTM(6, 5, num_layers=2, batch_first=True), 4, 6, call=recur),
    "lstm projected": lambda: sloped(
        nn.LSTM(6, 5, proj_size=3, batch_first=True), 4, 6, call=recur
    ),
}


def train(case: Case, method: Any, rank: int, group: Any) -> list[dict[str, Tensor | None]]:
    """The gradients of every step."""
    model, found = copy.deepcopy(case.model), []
    session = og.distribute(model, method, group=group)
    for _ in range(STEPS):
        model.zero_grad()
        run(model, case, case.batches[rank]).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    session.detach()
    return found


def by_ddp(case: Case, rank: int, group: Any) -> dict[str, Tensor | None]:
    model = copy.deepcopy(case.model)
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=group, find_unused_parameters=True
    )
    run(wrapped, case, case.batches[rank]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_inputs_may_be_part_of_the_loss(name, sites):
    case = CASES[name]()
    expected = pooled(case, sites)

    def body(rank, group):
        peer = by_ddp(case, rank, group)
        return peer, {label: train(case, method, rank, group) for label, method in METHODS.items()}

    for rank, (peer, methods) in enumerate(run_on_lasting_groups(sites, body)):
        for label, steps in methods.items():
            for k, gradients in enumerate(steps):
                for parameter, gradient in gradients.items():
                    error = relative_error(gradient, expected[parameter])
                    beside = relative_error(peer[parameter], expected[parameter])
                    where = f"{label}, rank {rank}, step {k}, {parameter}"
                    assert error < max(5e-6, 2 * beside), f"{where}: {error:.1e}, {beside:.1e}"
