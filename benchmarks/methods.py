"""The ways to make gradients global that the benchmarks compare.

Each has a process group of its own, as in a program that trains one model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Attach = Callable[[nn.Module], nn.Module]


def _outergrad(method: str, **options: object) -> Attach:
    def attach(model: nn.Module) -> nn.Module:
        import outergrad as og  # not at the top: DDP's own figures hold without it

        og.distribute(model, getattr(og, method)(**options), group=dist.new_group())
        return model

    return attach


METHODS: dict[str, Attach] = {
    "alone": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model, process_group=dist.new_group()),
    "dense": _outergrad("Dense"),
    "dad": _outergrad("DAD"),
    "dad-activations": _outergrad("DAD", reveal="activations"),
    "dad-always": _outergrad("DAD", always=True),
    "dad-64k": _outergrad("DAD", bucket_bytes=1 << 16),
    "dad-1m": _outergrad("DAD", bucket_bytes=1 << 20),
}
