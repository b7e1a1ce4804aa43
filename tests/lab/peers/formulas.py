"""The peers' formulas for all sites at once, in NumPy or by PyTorch's own optimizers.

Weights of S sites are lists of dicts, by the parameter's name. Nothing of the peers is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.fft import dctn, idctn
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

Weights = dict[str, Tensor]
Codec = Callable[[np.ndarray], np.ndarray]
"""What is read of the values of one weight that were written."""


def network() -> nn.Module:
    """With all kinds of parameters: an embedding, matrices of unequal sides, a kernel, vectors.

    Weights are the same every time, in threads too, which share one random stream.
    """
    layers = [nn.Embedding(6, 4), nn.Linear(12, 16), nn.Conv1d(4, 6, 2), nn.Linear(8, 20)]
    model = nn.Sequential(*layers, nn.Linear(20, 4, bias=False)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def pull(site: int, name: str, weight: Tensor) -> Tensor:
    """The gradient at a site: towards its own target, more or less by entry."""
    seed = 1000 * site + sum(map(ord, name))
    generator = torch.Generator().manual_seed(seed)
    target, force = torch.rand(2, *weight.shape, generator=generator, dtype=torch.float64)
    return force * (weight - 3 * target)


def start(sites: int) -> list[Weights]:
    """The weights that all begin with."""
    named = dict(network().named_parameters())
    return [{name: p.detach().clone() for name, p in named.items()} for _ in range(sites)]


def local_optimizers(weights: list[Weights], make: Callable[..., Optimizer]) -> list[Optimizer]:
    """One per site, of its own weights."""
    for own in weights:
        for name, w in own.items():
            own[name] = nn.Parameter(w)
    return [make(list(own.values())) for own in weights]


def local_step(weights: list[Weights], optimizers: list[Optimizer]) -> None:
    """Every site by itself."""
    for site, (own, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
        for name, w in own.items():
            w.grad = pull(site, name, w.detach())
        optimizer.step()


# -- chunks --------------------------------------------------------------------------------------


def blocks(matrix: np.ndarray, side: int) -> Iterator[tuple[slice, slice]]:
    """Where the chunks of a matrix are."""
    o, i = (max(d for d in range(1, side + 1) if n % d == 0) for n in matrix.shape)
    for row in range(0, matrix.shape[0], o):
        for column in range(0, matrix.shape[1], i):
            yield slice(row, row + o), slice(column, column + i)


def as_matrix(w: Tensor) -> np.ndarray:
    """A copy; vectors are a row."""
    return (w.flatten(1) if w.dim() > 1 else w[None]).detach().numpy().copy()


def largest(matrix: np.ndarray, side: int, entries: int, codec: Codec) -> np.ndarray:
    """All but the largest entries of each chunk are zero."""
    found = np.zeros_like(matrix)
    for at in blocks(matrix, side):
        chunk = matrix[at]
        least = np.sort(np.abs(chunk), axis=None)[-min(entries, chunk.size)]
        found[at] = np.where(np.abs(chunk) >= least, chunk, 0)
    sent = found != 0
    found[sent] = codec(found[sent])
    return found


def on_chunks(transform: Callable[..., np.ndarray], matrix: np.ndarray, side: int) -> np.ndarray:
    """A transform of every chunk."""
    found = np.zeros_like(matrix)
    for at in blocks(matrix, side):
        found[at] = transform(matrix[at], norm="ortho")
    return found


def as_they_are(values: np.ndarray) -> np.ndarray:
    return values


def int8(values: np.ndarray) -> np.ndarray:
    step = float(np.float32(np.abs(values).max() / 127))
    return np.round(values / step) * step


def two_bits(values: np.ndarray) -> np.ndarray:
    size = np.abs(values)
    large = size > size.mean()
    low, high = (float(np.float32(size[part].mean())) for part in (~large, large))
    return np.sign(values) * np.where(large, high, low)


CODECS: dict[int, Codec] = {32: as_they_are, 8: int8, 2: two_bits}


# -- the peers -----------------------------------------------------------------------------------


def demo(sites: int, steps: int, *, beta, lr, side, entries, bits=32) -> list[Weights]:
    weights = start(sites)
    m = [{name: np.zeros_like(as_matrix(w)) for name, w in own.items()} for own in weights]
    for _ in range(steps):
        for name in weights[0]:
            sent = []
            for site, own in enumerate(weights):
                gradient = as_matrix(pull(site, name, own[name]))
                m[site][name] = beta * m[site][name] + lr * gradient
                cosines = on_chunks(dctn, m[site][name], side)
                q = largest(cosines, side, entries, CODECS[bits])
                m[site][name] -= on_chunks(idctn, q, side)
                sent.append(q)
            update = np.sign(on_chunks(idctn, sum(sent) / sites, side))
            for own in weights:
                own[name] = own[name] - lr * torch.from_numpy(update).view(own[name].shape)
    return weights


def sparse_loco(sites: int, steps: int, *, every, lr, beta, side, entries, bits) -> list[Weights]:
    weights, shared = start(sites), start(1)[0]
    optimizers = local_optimizers(weights, lambda params: AdamW(params, lr=0.05))
    e = [{name: np.zeros_like(as_matrix(w)) for name, w in own.items()} for own in weights]
    for step in range(1, steps + 1):
        local_step(weights, optimizers)
        if step % every and step < steps:
            continue
        for name, last in shared.items():
            mean = 0
            for site, own in enumerate(weights):
                e[site][name] = beta * e[site][name] + lr * as_matrix(last - own[name])
                q = largest(e[site][name], side, entries, CODECS[bits])
                e[site][name] -= q
                mean = mean + q / sites
            shared[name] = last - torch.from_numpy(mean).view(last.shape)
            for own in weights:
                own[name].data.copy_(shared[name])
    return weights


def diloco(sites: int, steps: int, *, every) -> list[Weights]:
    """The outer optimizer is SGD of rate 0.7 with Nesterov momentum 0.9."""
    weights, shared = start(sites), start(1)[0]
    optimizers = local_optimizers(weights, lambda params: AdamW(params, lr=0.05))
    velocity = {name: torch.zeros_like(w) for name, w in shared.items()}
    for step in range(1, steps + 1):
        local_step(weights, optimizers)
        if step % every:
            continue
        for name, last in shared.items():
            change = sum(last - own[name].detach() for own in weights) / sites
            velocity[name] = 0.9 * velocity[name] + change
            shared[name] = last - 0.7 * (change + 0.9 * velocity[name])
            for own in weights:
                own[name].data.copy_(shared[name])
    return weights


def dion(sites: int, steps: int, first, *, rank, mu, lr, weight_decay, adam_lr) -> list[Weights]:
    """Takes the first Q of every matrix; a single site has the mean of all momenta."""
    weights = start(1)
    rest = [{name: w for name, w in weights[0].items() if name not in first}]
    optimizers = local_optimizers(rest, lambda params: AdamW(params, lr=adam_lr))
    m = [{name: torch.zeros_like(weights[0][name]) for name in first} for _ in range(sites)]
    right = dict(first)
    for _ in range(steps):
        for name, q in right.items():
            theta = weights[0][name]
            for site in range(sites):
                m[site][name] = m[site][name] + pull(site, name, theta)
            p = torch.linalg.qr(sum(own[name] for own in m) @ q / sites)[0]
            r = sum(own[name].T @ p for own in m) / sites
            for own in m:
                own[name] = own[name] - (1 - mu) * p @ r.T
            right[name] = r / r.pow(2).sum(0, keepdim=True).sqrt()
            ratio = (theta.shape[0] / theta.shape[1]) ** 0.5
            weights[0][name] = theta - lr * (weight_decay * theta + ratio * p @ right[name].T)
        for name, w in rest[0].items():
            w.grad = sum(pull(site, name, w.detach()) for site in range(sites)) / sites
        optimizers[0].step()
    return [weights[0] | rest[0]] * sites


def acp_sgd(sites: int, steps: int, first, *, rank) -> list[Weights]:
    """Takes the first Q of every matrix."""
    weights = start(1)
    optimizers = local_optimizers(weights, lambda params: SGD(params, lr=0.1))
    e = [{n: torch.zeros_like(weights[0][n].flatten(1)) for n in first} for _ in range(sites)]
    p, q = {}, dict(first)
    for step in range(1, steps + 1):
        for name, w in weights[0].items():
            pulls = [pull(site, name, w.detach()) for site in range(sites)]
            if name not in first:
                w.grad = sum(pulls) / sites
                continue
            owed = [own[name] + g.flatten(1) for own, g in zip(e, pulls, strict=True)]
            if step % 2:
                q[name] = torch.linalg.qr(q[name])[0]
                sent = [g @ q[name] for g in owed]
                lost = [g - x @ q[name].T for g, x in zip(owed, sent, strict=True)]
                p[name] = sum(sent) / sites
            else:
                p[name] = torch.linalg.qr(p[name])[0]
                sent = [g.T @ p[name] for g in owed]
                lost = [g - p[name] @ x.T for g, x in zip(owed, sent, strict=True)]
                q[name] = sum(sent) / sites
            for own, left in zip(e, lost, strict=True):
                own[name] = left
            w.grad = (p[name] @ q[name].T).view(w.shape)
        optimizers[0].step()
    return weights * sites


def sparta(sites: int, steps: int, drawn: Callable[[int], list[Tensor]]) -> list[Weights]:
    """Takes what is drawn after a step."""
    weights = start(sites)
    optimizers = local_optimizers(weights, lambda params: AdamW(params, lr=0.05))
    for step in range(1, steps + 1):
        local_step(weights, optimizers)
        for name, mask in zip(weights[0], drawn(step), strict=True):
            mean = sum(own[name].detach() for own in weights) / sites
            for own in weights:
                own[name].data.copy_(torch.where(mask, mean, own[name].detach()))
    return weights
