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
    """With all kinds of parameters: an embedding, matrices of unequal sides, kernels, vectors.

    Weights are the same every time, in threads too, which share one random stream.
    """
    layers = [nn.Embedding(6, 4), nn.Linear(12, 16), nn.Conv1d(4, 6, 2), nn.Linear(8, 20)]
    layers += [nn.Linear(20, 4, bias=False), nn.Conv1d(6, 10, 3)]
    model = nn.Sequential(*layers).double()
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


# -- Muon ----------------------------------------------------------------------------------------


def orth(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton-Schulz."""
    if matrix.shape[0] > matrix.shape[1]:
        return orth(matrix.T).T
    x = matrix / np.sqrt((matrix**2).sum())
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def muon_step(matrix: np.ndarray) -> np.ndarray:
    """The step of a matrix at a learning rate of 1."""
    return 0.2 * max(matrix.shape) ** 0.5 * orth(matrix)


# -- the peers -----------------------------------------------------------------------------------


def demo(
    sites: int, steps: int, *, beta, lr, side, entries, bits=32, alpha=1.0, update="sign", hidden=()
) -> list[Weights]:
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
                m[site][name] -= alpha * on_chunks(idctn, q, side)
                sent.append(q)
            step = on_chunks(idctn, sum(sent) / sites, side)
            if update == "orth" and name in hidden:
                step = lr * muon_step(step)
            elif update != "identity":
                step = lr * np.sign(step)
            for own in weights:
                own[name] = own[name] - torch.from_numpy(step).view(own[name].shape)
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


def binned(values: np.ndarray, bits: int) -> np.ndarray:
    """Each number as the mean of its bin, bins within three deviations of the mean."""
    edges = values.mean() + values.std() * np.linspace(-3, 3, 2**bits + 1)[1:-1]
    bins = np.searchsorted(edges, values, side="right")
    # Sums of few float32 are often half between two of them, so the order of the sum is the peer's.
    sums, counts = np.bincount(bins, weights=values), np.maximum(np.bincount(bins), 1)
    return (sums / counts).astype(np.float32)[bins].astype(np.float64)


def muloco(sites: int, steps: int, *, every, bits, lr, momentum, beta) -> list[Weights]:
    weights, shared = start(sites), start(1)[0]
    optimizers = local_optimizers(weights, lambda params: AdamW(params, lr=0.05))
    e = [{name: np.zeros(w.numel()) for name, w in own.items()} for own in weights]
    velocity = {name: torch.zeros_like(w) for name, w in shared.items()}
    for step in range(1, steps + 1):
        local_step(weights, optimizers)
        if step % every and step < steps:
            continue
        for name, last in shared.items():
            sent = [(last - own[name].detach()).numpy().flatten() for own in weights]
            if last.dim() > 1:
                owed = [beta * own[name] + x for own, x in zip(e, sent, strict=True)]
                sent = [binned(x, bits) for x in owed]
                for own, all_of_it, part in zip(e, owed, sent, strict=True):
                    own[name] = all_of_it - part
            mean = sum(sent) / sites
            if last.dim() > 1:
                pieces = np.array_split(mean, sites)
                mean = np.concatenate([binned(piece, bits) for piece in pieces])
            change = torch.from_numpy(mean).view(last.shape)
            velocity[name] = momentum * velocity[name] + lr * change
            shared[name] = last - momentum * velocity[name] - lr * change
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


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Orthonormal columns, each less what the ones before it have of it."""
    found: list[Tensor] = []
    for column in matrix.T:
        for other in found:
            column = column - (other @ column) * other
        found.append(column / column.pow(2).sum().sqrt())
    return torch.stack(found, dim=1)


def dion(
    sites: int, steps: int, first, *, rank, mu, lr, weight_decay, adam_lr, columns="length"
) -> list[Weights]:
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
            scaled = r / r.pow(2).sum(0, keepdim=True).sqrt()
            right[name] = gram_schmidt(r) if columns == "qr" else scaled
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


def muon_like(
    sites: int,
    steps: int,
    hidden: list[str],
    moved: Callable[[int, str, np.ndarray, list[np.ndarray]], np.ndarray],
) -> list[Weights]:
    """Hidden weights by `moved`, of step, name, weight and all gradients, the rest by AdamW."""
    weights = start(1)
    rest = [{name: w for name, w in weights[0].items() if name not in hidden}]
    optimizers = local_optimizers(rest, lambda params: AdamW(params, lr=0.05))
    for step in range(steps):
        for name in hidden:
            theta = weights[0][name]
            pulls = [as_matrix(pull(site, name, theta)) for site in range(sites)]
            after = moved(step, name, as_matrix(theta), pulls)
            weights[0][name] = torch.from_numpy(after).view(theta.shape)
        for name, w in rest[0].items():
            w.grad = sum(pull(site, name, w.detach()) for site in range(sites)) / sites
        optimizers[0].step()
    return [weights[0] | rest[0]] * sites


def dion2(sites: int, steps: int, hidden, drawn, *, alpha, mu, weight_decay) -> list[Weights]:
    """Takes S of a step and a weight; with None S has the rows of the largest sums."""
    m = [dict.fromkeys(hidden, 0) for _ in range(sites)]

    def moved(step, name, theta, pulls):
        turned = theta.shape[0] > theta.shape[1]
        for own, g in zip(m, pulls, strict=True):
            own[name] = own[name] + (g.T if turned else g)
        theta = (theta.T if turned else theta) * (1 - 0.05 * weight_decay)
        count = round(alpha * len(theta))
        sums = sum(np.abs(own[name]).sum(1) for own in m)
        rows = np.argsort(-sums)[:count] if drawn is None else drawn(step, name)
        assert len(set(rows)) == count
        x = orth(sum(own[name][rows] for own in m) / sites)
        for own in m:
            own[name][rows] *= mu
        theta[rows] -= 0.05 * 0.2 * max(theta.shape) ** 0.5 * x
        return theta.T.copy() if turned else theta

    return muon_like(sites, steps, hidden, moved)


def ef21_muon(sites: int, steps: int, hidden, compressed, *, beta, weight_decay) -> list[Weights]:
    """Takes C of a step, a name and a matrix."""
    m, known = ([dict.fromkeys(hidden, 0) for _ in range(sites)] for _ in range(2))

    def moved(step, name, theta, pulls):
        for own, there, g in zip(m, known, pulls, strict=True):
            own[name] = (1 - beta) * own[name] + beta * g
            there[name] = there[name] + compressed(step, name, own[name] - there[name])
        mean = sum(there[name] for there in known) / sites
        return theta * (1 - 0.05 * weight_decay) - 0.05 * muon_step(mean)

    return muon_like(sites, steps, hidden, moved)


def lordo(
    sites: int, steps: int, first, *, every, rank, omega, scale, beta1, beta2, eps
) -> list[Weights]:
    """Takes the first Q of every hidden weight, (O, R) for O no more than I."""
    weights, shared, lr = start(sites), start(1)[0], 0.05
    rest = [{n: w for n, w in own.items() if n not in first} for own in weights]
    optimizers = local_optimizers(rest, lambda params: AdamW(params, lr=lr))
    q = {name: x.numpy() for name, x in first.items()}
    e, u, v = ([dict.fromkeys(first, 0) for _ in range(sites)] for _ in range(3))

    def wide(w: Tensor) -> np.ndarray:
        matrix = as_matrix(w)
        return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T

    def back(matrix: np.ndarray, w: Tensor) -> Tensor:
        turned = w.shape[0] > w[0].numel()
        return torch.from_numpy((matrix.T if turned else matrix).copy()).view(w.shape)

    for step in range(1, steps + 1):
        for site, own in enumerate(weights):
            for name in first:
                g = wide(pull(site, name, own[name]))
                owed = g + e[site][name]
                inside = q[name].T @ owed
                e[site][name] = owed - q[name] @ inside
                u[site][name] = beta1 * u[site][name] + (1 - beta1) * inside
                v[site][name] = beta2 * v[site][name] + (1 - beta2) * inside**2
                first_moment = u[site][name] / (1 - beta1**step)
                second = v[site][name] / (1 - beta2**step)
                whole = g / (scale * (np.sqrt(second.mean(0)) + eps))
                low = q[name] @ (first_moment / (np.sqrt(second) + eps))
                down = lr * ((1 - omega) * whole + omega * low)
                own[name] = back(wide(own[name]) - down, own[name])
        local_step(rest, optimizers)
        if step % every and step < steps:
            continue
        for name, last in shared.items():
            all_of_it = [own[name].detach() for own in (rest if name in rest[0] else weights)]
            shared[name] = sum(all_of_it) / sites
            for own, of_rest in zip(weights, rest, strict=True):
                if name in of_rest:
                    of_rest[name].data.copy_(shared[name])
                own[name] = shared[name].clone()
            if name in first:
                basis = np.linalg.svd(wide(last) - wide(shared[name]))[0][:, :rank]
                turn = basis.T @ q[name]
                q[name] = basis
                for moment, by in ((u, turn), (v, turn**2)):
                    mean = by @ sum(own[name] for own in moment) / sites
                    for own in moment:
                        own[name] = mean
    return weights
