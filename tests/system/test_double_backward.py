"""Gradients of inputs that are part of the loss: penalties, forces, differential equations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import outergrad as og
from cases import METHODS, Branches, Case, pooled, relative_error, rows, run, sequences
from covering import covering
from every_method import STEPS, assert_exact
from meshes import run_mesh
from ranks import run_on_lasting_groups


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


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("name", "sites"), covering(CASES.keys(), [1, 2], quick=4, every=2))
def test_gradients_of_inputs_may_be_part_of_the_loss(name, sites):
    assert_exact(CASES[name](), sites, list(CASES).index(name))


def test_the_first_step_has_factors_and_those_after_it_are_dense():
    case = CASES["critic"]()

    def body(rank, group):
        model, ways = copy.deepcopy(case.model), []
        session = og.distribute(model, og.DAD(always=True), group=group)
        for _ in range(2):
            run(model, case, case.batches[rank]).backward()
            line = session.coverage()[0]
            ways.append((line.travels, line.why))
        session.detach()
        return ways

    for first, second in run_on_lasting_groups(2, body):
        assert first[0] == "factors"
        assert second[0] == "dense"
        assert "gradient of a gradient" in second[1]


# -- loops --------------------------------------------------------------------------------------

SITES = 2


def copies(*models: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(model) for model in models]


def assert_same(found: list[Tensor], expected: list[Tensor], limit: float = 2e-5) -> None:
    for k, (p, q) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(p, q.double()) < limit, (k, relative_error(p, q.double()))


def parameters_of(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def sample(site: int, step: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + site)
    return torch.randn(4, width, generator=generator)


def adversarial(
    generator: nn.Module, critic: nn.Module, sites: list[int], dtype: torch.dtype
) -> list[Tensor]:
    """Four rounds of WGAN-GP, the critic frozen while the generator learns."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (critic, generator)]
    share = 1 / len(sites)
    for k in range(4):
        optimizers[0].zero_grad()
        for site in sites:
            real, noise = (sample(site, 2 * k + i, n).to(dtype) for i, n in enumerate((6, 3)))
            with torch.no_grad():
                fake = generator(noise)
            between = real.lerp(fake, 0.3).requires_grad_()
            g = slope(critic(between), between).view(len(real), -1)
            loss = critic(fake).mean() - critic(real).mean() + ((g.norm(dim=1) - 1) ** 2).mean()
            (share * loss).backward()
        optimizers[0].step()
        critic.requires_grad_(False)
        optimizers[1].zero_grad()
        for site in sites:
            (-share * critic(generator(sample(site, 7 * k, 3).to(dtype))).mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(True)
    return parameters_of(generator, critic)


@pytest.mark.parametrize("method", covering(METHODS, quick=3))
def test_two_networks_play_against_each_other(method):
    models = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 6)), perceptron()
    expected = adversarial(*(m.double() for m in copies(*models)), [0, 1], torch.float64)

    def body(rank, group):
        generator, critic = copies(*models)
        for model in (generator, critic):
            og.distribute(model, method, group=group)
        return adversarial(generator, critic, [rank], torch.float32)

    for found in run_on_lasting_groups(SITES, body):
        assert_same(found, expected)


def now_and_then(
    model: nn.Module, sites: list[int], dtype: torch.dtype, session: Any = None
) -> list[Tensor]:
    """A penalty in every third step, one on one site alone, and steps of two passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for k in range(8):
        optimizer.zero_grad()
        for micro in range(2):
            hold = session.no_sync() if session and not micro else nullcontext()
            for site in sites:
                x = sample(site, 2 * k + micro, 6).to(dtype).requires_grad_()
                y = model(x)
                loss = (y**2).mean() + y.mean()
                if k % 3 == 2 or (k == 4 and site == 1):
                    loss = loss + (slope(y, x) ** 2).sum()
                with hold:
                    (loss / len(sites)).backward()
        optimizer.step()
    return parameters_of(model)


@pytest.mark.parametrize("method", covering(METHODS, quick=3))
def test_penalties_now_and_then_and_with_accumulation(method):
    model = perceptron()
    expected = now_and_then(copies(model)[0].double(), [0, 1], torch.float64)

    def body(rank, group):
        (own,) = copies(model)
        session = og.distribute(own, method, group=group)
        return now_and_then(own, [rank], torch.float32, session)

    for found in run_on_lasting_groups(SITES, body):
        assert_same(found, expected)


def test_of_sites_of_several_ranks():
    case = CASES["critic"]()
    expected = pooled(case, 4)

    def body(mesh):
        model, found = copy.deepcopy(case.model), []
        og.distribute(model, og.DAD(always=True), mesh=mesh)
        for _ in range(STEPS):
            model.zero_grad()
            run(model, case, case.batches[mesh.number]).backward()
            found.append({name: p.grad for name, p in model.named_parameters()})
        return found

    for steps in run_mesh(2, 2, body):
        for gradients in steps:
            for name, gradient in gradients.items():
                assert relative_error(gradient, expected[name]) < 5e-6, name


@pytest.mark.parametrize("name", ["dense", "dad forced", "edad raw forced", "rank-dad, full rank"])
def test_under_autocast_as_right_as_autograd_itself(name):
    """As PyTorch's examples do it: what is differentiated is scaled, the penalty is not."""
    case = CASES["critic"]()

    def loss_of(model, x):
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model.critic(x)
        (g,) = torch.autograd.grad(1024 * y.sum(), x, create_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y.mean() + ((g / 1024).norm(dim=1) - 1).square().mean()

    def gradients(model, ranks):
        model.zero_grad()
        for rank in ranks:
            (loss_of(model, case.batches[rank][0]) / len(ranks)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    plain, exact = copies(case.model, case.model)
    by_autograd = gradients(plain, [0, 1])
    exact.double()
    expected = {}
    for rank in (0, 1):
        x = case.batches[rank][0].double().requires_grad_()
        y = exact.critic(x)
        g = slope(y, x).view(len(x), -1)
        ((y.mean() + (g.norm(dim=1) - 1).square().mean()) / 2).backward()
    expected = {n: p.grad for n, p in exact.named_parameters()}

    def body(rank, group):
        (model,) = copies(case.model)
        og.distribute(model, METHODS[name], group=group)
        return [gradients(model, [rank]) for _ in range(STEPS)]

    for steps in run_on_lasting_groups(SITES, body):
        for found in steps:
            for n, gradient in found.items():
                beside = relative_error(by_autograd[n], expected[n])
                assert relative_error(gradient, expected[n]) < 1.5 * beside + 2e-3, n


# -- gradients of weights -----------------------------------------------------------------------


def test_gradients_of_clones_of_weights_may_be_part_of_the_loss():
    """MAML: an inner step on clones of the weights, as the errors for weights say."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    batches = [x for (x,) in rows(6)]

    def adapted(model, x):
        clones = {name: p.clone() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, clones, (x,)).square().mean()
        found = torch.autograd.grad(loss, clones.values(), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(clones.items(), found, strict=True)}
        return torch.func.functional_call(model, fast, (x.flip(0),)).sin().mean()

    pooled_model = copies(model)[0].double()
    for x in batches[:SITES]:
        (adapted(pooled_model, x.double()) / SITES).backward()
    expected = [p.grad for p in pooled_model.parameters()]

    def body(rank, group):
        found = []
        for method in METHODS.values():
            (own,) = copies(model)
            session = og.distribute(own, method, group=group)
            for _ in range(STEPS):
                own.zero_grad()
                adapted(own, batches[rank]).backward()
                found.append([p.grad for p in own.parameters()])
            session.detach()
        return found

    for steps in run_on_lasting_groups(SITES, body):
        for gradients in steps:
            assert_same(gradients, expected, 5e-6)
