"""Two sites train a small network by each method; gradients are compared with the pooled ones.

It needs torch and numpy alone, as the library itself does.
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outergrad as og

SITES, ROWS, STEPS = 2, 6, 4
EXACT = (og.Dense(), og.DAD(), og.EDAD(), og.Auto())
LOSSY = (og.RankDAD(rank=2), og.RankDAD(rank=2, wire=og.wire.Int4()), og.Sparse())

torch.manual_seed(0)
START = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(site: int, step: int) -> tuple[Tensor, Tensor]:
    """Rows and labels of a site."""
    generator = torch.Generator().manual_seed(100 * site + step)
    x = torch.randn(ROWS, 20, generator=generator)
    return x, torch.randint(0, 4, (ROWS,), generator=generator)


def pooled(model: nn.Module, step: int) -> list[Tensor]:
    """The mean gradient of all sites, in float64."""
    whole = copy.deepcopy(START).double()
    whole.load_state_dict(model.state_dict())
    x, y = (torch.cat(parts) for parts in zip(*(batch(s, step) for s in range(SITES)), strict=True))
    cross_entropy(whole(x.double()), y).backward()
    return [p.grad for p in whole.parameters() if p.grad is not None]


def train(method: object, site: int, *, exact: bool) -> None:
    """A few steps of one site; in the end all have the same weights."""
    model = copy.deepcopy(START)
    session = og.distribute(model, method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(site, step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        expected = pooled(model, step) if exact else []
        for p, mean in zip(model.parameters(), expected, strict=exact):
            torch.testing.assert_close(p.grad.double(), mean, rtol=1e-5, atol=1e-6)
        optimizer.step()
    session.detach()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    of_all = [torch.empty_like(weights) for _ in range(SITES)]
    dist.all_gather(of_all, weights)
    assert all(weights.equal(other) for other in of_all), f"{method}: sites differ"


def main(site: int, folder: str) -> None:
    """All methods at one site."""
    where = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=where, rank=site, world_size=SITES)
    for method in (*EXACT, *LOSSY):
        train(method, site, exact=method in EXACT)
    os._exit(0)  # gloo's threads may drop tensors while Python ends, and then abort


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), nprocs=SITES)
