"""Small programs of the kinds that people publish, written for PyTorch's DistributedDataParallel.

Each takes the class that its import would have named. It trains, saves with `torch.save` half-way
as scripts do, begins anew from that file, and returns its losses and weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outergrad as og

STEPS = 6


@dataclass(frozen=True)
class Script:
    """A program.

    Attributes:
        build: makes its models, the same on every rank.
        train: trains the wrapped models on a rank's rows from one step to another, and returns the
            losses; with their optimizers, as `optimizers` makes them.
        optimizers: of the models.
    """

    build: Callable[[], list[nn.Module]]
    optimizers: Callable[[Sequence[nn.Module]], list[torch.optim.Optimizer]]
    train: Callable[..., Iterator[float]]


def run(
    script: Script,
    models: Sequence[nn.Module],
    ddp: Callable[[nn.Module], Any],
    rank: int,
    folder: Path,
) -> tuple[list[float], dict[str, Tensor]]:
    """Trains for half of the steps, saves, and goes on in new models with what was saved.

    A wrapper that has an `end` is told when its training is over.
    """
    losses: list[float] = []
    file = folder / f"checkpoint-{rank}.pt"
    for first in (0, STEPS // 2):
        plain = [copy.deepcopy(model) for model in models]
        wrapped = [ddp(model) for model in plain]
        optimizers = script.optimizers(wrapped)
        if first:
            saved = torch.load(file, weights_only=True)
            for model, state in zip(wrapped, saved["models"], strict=True):
                model.module.load_state_dict(state)
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        losses += script.train(wrapped, optimizers, rank, range(first, first + STEPS // 2))
        about = {
            "models": [model.module.state_dict() for model in wrapped],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        torch.save(about, file)
        for model in wrapped:
            getattr(model, "end", lambda: None)()
        del wrapped, optimizers
    return losses, named(plain)


class ThreeLines:
    """A program without the wrapper: `og.distribute`, the plain model, `session.no_sync()`.

    It has the wrapper's names for these, so that the same programs run, and no other of its own.
    """

    def __init__(self, module: nn.Module, method: Any, group: Any) -> None:
        self.module = module
        self.session = og.distribute(module, method, group=group)
        self.no_sync, self.end = self.session.no_sync, self.session.detach
        self._unsynchronised = ExitStack()

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def require_backward_grad_sync(self) -> bool:
        raise AttributeError("a plain model has no such attribute")

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, shares: bool) -> None:
        """The program has `with session.no_sync():` around the passes that do not share."""
        self._unsynchronised.close()
        if not shares:
            self._unsynchronised.enter_context(self.no_sync())


def named(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Copies of the weights of several models."""
    return {
        f"{k}.{name}": p.detach().clone()
        for k, model in enumerate(models)
        for name, p in model.named_parameters()
    }


def drawn(rank: int, step: int, part: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + 10 * step + part)


def usual(loss_of: Callable[[nn.Module, int, int], Tensor]) -> Callable[..., Iterator[float]]:
    """A loop of one backward per step, by the loss of a model, a rank and a step."""

    def train(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
        (model,) = models
        for step in steps:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            yield loss.item()

    return train


# -- nanoGPT: accumulation by the attribute, clipping, a schedule ---------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm_1(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, tokens: int = 24, width: int = 32, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (model,), (optimizer,), parts = models, optimizers, 3
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (0.5 + 0.5 * math.cos(step / STEPS))
        for part in range(parts):
            model.require_backward_grad_sync = part == parts - 1
            ids = torch.randint(0, 24, (4, 17), generator=drawn(rank, step, part))
            loss = model(ids[:, :-1], ids[:, 1:]) / parts
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


# -- a word model: state carried over, updates by hand --------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(30, 24)
        self.lstm = nn.LSTM(24, 24, 2)
        self.decoder = nn.Linear(24, 30)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.lstm(self.encoder(ids), state)
        return self.decoder(out).flatten(0, 1), state


def word_lstm(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (model,) = models
    state = (torch.zeros(2, 4, 24), torch.zeros(2, 4, 24))
    for step in steps:
        ids = torch.randint(0, 30, (11, 4), generator=drawn(rank, step))
        model.zero_grad()
        state = tuple(part.detach() for part in state)
        out, state = model(ids[:-1], state)
        loss = F.cross_entropy(out, ids[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-2.0)
        yield loss.item()


# -- timm: AMP with a scaler, accumulation by `no_sync`, an average of the weights ----------------


def timm_loop(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (model,), (optimizer,) = models, optimizers
    average = copy.deepcopy(model.module)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def forward(step: int, part: int) -> Tensor:
        x, y = torch.randn(6, 3, 8, 8, generator=drawn(rank, step, part)), torch.arange(6) % 5
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
        return loss

    for step in steps:
        optimizer.zero_grad()
        if hasattr(model, "no_sync"):
            with model.no_sync():
                forward(step, 0)
        loss = forward(step, 1)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for own, p in zip(average.parameters(), model.module.parameters(), strict=True):
                own.lerp_(p, 0.1)
        yield loss.item()


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 16, 3, stride=2, groups=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


# -- a GAN: two models that take turns ------------------------------------------------------------


def gan(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (generator, critic), (of_generator, of_critic) = models, optimizers
    for step in steps:
        real = torch.randn(8, 10, generator=drawn(rank, step)) + 1
        noise = torch.randn(8, 4, generator=drawn(rank, step, 1))
        of_critic.zero_grad()
        ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
        both = torch.cat([real, generator(noise).detach()])
        loss = F.binary_cross_entropy_with_logits(critic(both), torch.cat([ones, zeros]))
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        F.binary_cross_entropy_with_logits(critic(generator(noise)), ones).backward()
        of_generator.step()
        yield loss.item()


# -- SAM: a first backward of each rank's own, a second at other weights --------------------------


def sam(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (model,), (optimizer,) = models, optimizers
    for step in steps:
        x = torch.randn(8, 10, generator=drawn(rank, step))
        with model.no_sync():
            model(x).square().mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            before = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for p, old in zip(model.parameters(), before, strict=True):
            p.data = old
        optimizer.step()
        yield loss.item()


# -- L-BFGS: several passes per step --------------------------------------------------------------


def lbfgs(models: Any, optimizers: Any, rank: int, steps: range) -> Iterator[float]:
    (model,), (optimizer,) = models, optimizers
    for step in steps:
        x = torch.randn(16, 10, generator=drawn(rank, step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            loss.backward()
            return torch.tensor(1.0)  # each rank's own loss would stop them apart

        optimizer.step(closure)
        yield 1.0


# -- a graph network: sums over edges -------------------------------------------------------------


class GIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(perceptron(8, 16, 8) for _ in range(2))
        self.share = nn.Parameter(torch.zeros(2))
        self.read = nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            near = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = layer((1 + self.share[k]) * x + near)
        return self.read(torch.zeros(4, 8).index_add(0, graph, x))


def gin(model: nn.Module, rank: int, step: int) -> Tensor:
    draw, nodes = drawn(rank, step), 12 + rank
    x = torch.randn(nodes, 8, generator=draw)
    edges = torch.randint(0, nodes, (2, 20 + 3 * rank), generator=draw)
    return F.cross_entropy(model(x, edges, torch.arange(nodes) % 4), torch.arange(4) % 3)


# -- DLRM: bags of ids, products of features ------------------------------------------------------


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(40, 8, mode="sum") for _ in range(3))
        self.bottom, self.top = perceptron(6, 16, 8), perceptron(14, 16, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(x)
        all_ = torch.stack([dense, *(bag(ids[k]) for k, bag in enumerate(self.bags))], dim=1)
        products = all_ @ all_.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([dense, products[:, rows, columns]], dim=1))


def dlrm(model: nn.Module, rank: int, step: int) -> Tensor:
    draw = drawn(rank, step)
    x, ids = torch.randn(9, 6, generator=draw), torch.randint(0, 40, (3, 9, 4), generator=draw)
    return F.binary_cross_entropy_with_logits(model(x, ids), (x[:, :1] > 0).float())


# -- a U-Net of three dimensions ------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.InstanceNorm3d(6), nn.PReLU())
        self.low = nn.Sequential(nn.Conv3d(6, 8, 3, 2, 1), nn.InstanceNorm3d(8), nn.PReLU())
        self.up, self.last = nn.ConvTranspose3d(8, 6, 2, 2), nn.Conv3d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.last(torch.cat([high, self.up(self.low(high))], dim=1))


def annotated_unet(model: nn.Module, rank: int, step: int) -> Tensor:
    """Images of MONAI, with what it knows of them."""
    from monai.data import MetaTensor

    x = torch.randn(2, 1, 4, 4, 4, generator=drawn(rank, step))
    image = MetaTensor(x, affine=torch.eye(4), meta={"patient": rank})
    return F.cross_entropy(model(image), (x[:, 0] > 0).long())


def unet(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(2, 1, 4, 4, 4, generator=drawn(rank, step))
    return F.cross_entropy(model(x), (x[:, 0] > 0).long())


# -- Muon for matrices, AdamW for the rest --------------------------------------------------------


def reconstruction(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 10, generator=drawn(rank, step))
    return (model(x) - x[:, :3]).square().mean()


def muon(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in models[0].parameters() if p.ndim == 2]
    rest = [p for p in models[0].parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adamw(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]


def sgd(models: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]


def of(kind: Callable[[], nn.Module]) -> Callable[[], list[nn.Module]]:
    return lambda: [kind()]


def small() -> nn.Module:
    return perceptron(10, 24, 24, 3)


SCRIPTS = {
    "nanoGPT": Script(of(GPT), adamw, nanogpt),
    "word LSTM": Script(of(Words), lambda models: [], word_lstm),
    "timm's loop": Script(of(convolutions), sgd, timm_loop),
    "GAN": Script(lambda: [perceptron(4, 16, 10), perceptron(10, 16, 1)], adamw, gan),
    "SAM": Script(of(small), sgd, sam),
    "L-BFGS": Script(
        of(small), lambda models: [torch.optim.LBFGS(models[0].parameters(), 0.1, 3)], lbfgs
    ),
    "GIN": Script(of(GIN), adamw, usual(gin)),
    "DLRM": Script(of(DLRM), sgd, usual(dlrm)),
    "3-D U-Net": Script(of(UNet), sgd, usual(unet)),
    "3-D U-Net on MetaTensors": Script(of(UNet), sgd, usual(annotated_unet)),
    "Muon": Script(of(small), muon, usual(reconstruction)),
}
