"""Noise on sums before they are sketched, or on the sketches: which leaves more of the gradient?

    python benchmarks/sketch_noise.py [STEPS]

With `og.PowerSGD` and `og.RankDAD(reduce="all_reduce")` sites send parts of `Y = M Q` and, with
`P = orth(Y)`, of `Z = Mᵀ P`; `P Zᵀ` is applied, and Z is the next Q. A sample changes M by C at
most, and so Y and Z, if Q has orthonormal columns.

- "sum": noise of σ C on M, once. Y and Z are made of M + N, which costs nothing further.
- "sketches": noise on Y, and other noise on Z. These are two releases, which together tell as much
  as one of σ if both have √2 σ: 1/σ² = 1/σ₁² + 1/σ₂².

A 784-256-256-10 MLP is trained by both on MNIST (in OUTERGRAD_DATA), by one site. Columns: rank;
where the noise is; mean over steps and the first two layers of cos², the squared cosine of what is
applied and the clipped sum without noise; of |P Zᵀ - P Pᵀ M|², noise in what is applied, over
K I σ² C², that of independent numbers in Z; loss and accuracy on the test set.
"""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise

import torch
from private_training import mnist
from torch import Tensor, nn

CLIP, SIGMA, LR, BATCH = 0.5, 1.0, 0.2, 512
WIDTHS = (784, 256, 256, 10)


class Sketched:
    """Subspace iteration on the sums of one layer.

    Args:
        rank: K.
        apart: whether noise is on the sketches.
        shape: (O, I).
    """

    def __init__(self, rank: int, shape: tuple[int, int], *, apart: bool) -> None:
        self.rank, self.apart = min(rank, *shape), apart
        self.q_IK = torch.linalg.qr(torch.randn(shape[1], self.rank))[0]
        self.cos2: list[float] = []
        self.noise: list[float] = []

    def applied(self, sum_OI: Tensor) -> Tensor:
        """Returns what is applied of the clipped sum, noise and all."""
        apart = 2**0.5 * SIGMA * CLIP if self.apart else 0.0
        seen_OI = sum_OI if apart else noisy(sum_OI, SIGMA * CLIP)
        p_OK = torch.linalg.qr(noisy(seen_OI @ self.q_IK, apart))[0]
        z_IK = noisy(seen_OI.T @ p_OK, apart)
        self.q_IK = torch.linalg.qr(z_IK)[0]
        found = p_OK @ z_IK.T
        cos = (found * sum_OI).sum() / (found.norm() * sum_OI.norm())
        energy = (z_IK - sum_OI.T @ p_OK).square().sum() / (z_IK.numel() * (SIGMA * CLIP) ** 2)
        self.cos2.append(float(cos) ** 2)
        self.noise.append(float(energy))
        return found


def noisy(t: Tensor, deviation: float) -> Tensor:
    """Returns a sum with noise."""
    return t + deviation * torch.randn_like(t)


def clipped_sums(layers: list[nn.Linear], x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns the sum of clipped gradients of each weight and bias, from rows."""
    inputs, outputs = [x], []
    for k, layer in enumerate(layers):
        outputs.append(layer(inputs[-1]))
        inputs.append(outputs[-1].relu() if k < len(layers) - 1 else outputs[-1])
    loss = nn.functional.cross_entropy(inputs[-1], y, reduction="sum")
    deltas = torch.autograd.grad(loss, outputs)
    pairs = [(d, a.detach()) for d, a in zip(deltas, inputs[:-1], strict=True)]
    squares_B = sum(d.square().sum(1) * (1 + a.square().sum(1)) for d, a in pairs)
    factor_B1 = (CLIP / torch.as_tensor(squares_B).sqrt()).clamp(max=1)[:, None]
    return [((d * factor_B1).T @ a, (d * factor_B1).sum(0)) for d, a in pairs]


def trained(rank: int, steps: int, *, apart: bool, seed: int = 0) -> tuple[float, ...]:
    """Trains, and returns cos², noise, loss and accuracy."""
    torch.manual_seed(seed)
    data = mnist()
    layers = [nn.Linear(i, o) for i, o in pairwise(WIDTHS)]
    sketches = [Sketched(rank, (*layer.weight.shape,), apart=apart) for layer in layers]
    params = [p for layer in layers for p in (layer.weight, layer.bias)]
    optimizer = torch.optim.SGD(params, lr=LR, momentum=0.9)
    for _ in range(steps):
        rows = torch.rand(len(data["x"])) < BATCH / len(data["x"])
        sums = clipped_sums(layers, data["x"][rows], data["y"][rows])
        for layer, sketch, (weight, bias) in zip(layers, sketches, sums, strict=True):
            layer.weight.grad = sketch.applied(weight) / BATCH
            layer.bias.grad = noisy(bias, SIGMA * CLIP) / BATCH
        optimizer.step()
    x = data["test_x"]
    with torch.no_grad():
        for layer in layers[:-1]:
            x = layer(x).relu()
        x = layers[-1](x)
    loss = nn.functional.cross_entropy(x, data["test_y"]).item()
    accuracy = (x.argmax(1) == data["test_y"]).float().mean().item()
    cos2 = [number for sketch in sketches[:2] for number in sketch.cos2]
    noise = [number for sketch in sketches[:2] for number in sketch.noise]
    return statistics.mean(cos2), statistics.mean(noise), loss, accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print("rank | noise on | cos² | noise applied | test loss | accuracy, %")
    for rank in (4, 16, 64):
        for apart in (False, True):
            cos2, noise, loss, accuracy = trained(rank, count, apart=apart)
            figures = f"{cos2:.3f} | {noise:.2f} | {loss:.3f} | {100 * accuracy:.1f}"
            print(f"{rank} | {'sketches' if apart else 'sum'} | {figures}", flush=True)
