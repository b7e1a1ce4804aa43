"""A model made ready to be trained by one of the methods that can be compared."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outergrad as og


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This site's copy of the model.

    Attributes:
        model: What to call and to train.
        session: Its session, where outergrad exchanges the gradients.
        start_bytes: What the session had sent before the first step.
    """

    model: nn.Module
    session: og.Session | None = None
    start_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Gradient bytes that this site sends per step, on average."""
        if self.session:
            stats = self.session.stats()
            return round((stats.total_sent_bytes - self.start_bytes) / max(stats.step, 1))
        if isinstance(self.model, DistributedDataParallel):
            return all_reduce_bytes(self.model)
        return 0

    def close(self) -> None:
        """Leaves a plain model."""
        if self.session:
            self.session.detach()


def all_reduce_bytes(model: nn.Module) -> int:
    """Bytes that a site sends to all-reduce every gradient in a ring."""
    sites = dist.get_world_size()
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return round(2 * (sites - 1) / sites * size)


def _plain(model: nn.Module, _reveal: str) -> Replica:
    return Replica(model=model)


def _ddp(model: nn.Module, _reveal: str) -> Replica:
    return Replica(model=DistributedDataParallel(model))


def _dense(model: nn.Module, _reveal: str) -> Replica:
    return _distributed(model, og.Dense())


def _dad(model: nn.Module, reveal: str) -> Replica:
    return _distributed(model, DADS[reveal])


def _distributed(model: nn.Module, method: og.Dense | og.DAD) -> Replica:
    session = og.distribute(model, method)
    return Replica(model=model, session=session, start_bytes=session.stats().total_sent_bytes)


DADS = {
    "gradient": og.DAD(reveal="gradient"),
    "activations": og.DAD(reveal="activations"),
}

METHODS: dict[str, Callable[[nn.Module, str], Replica]] = {
    "pooled": _plain,
    "alone": _plain,
    "dense": _dense,
    "ddp": _ddp,
    "dad": _dad,
}
"""What makes a model ready; each takes the model and a key of `DADS`."""
