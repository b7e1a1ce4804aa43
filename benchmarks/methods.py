"""The ways to make gradients global that the benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Attach = Callable[[nn.Module], nn.Module]


def _outergrad(method: str, **options: object) -> Attach:
    def attach(model: nn.Module) -> nn.Module:
        import outergrad as og  # not at the top: DDP's own figures hold without it

        og.distribute(model, getattr(og, method)(**options))
        return model

    return attach


METHODS: dict[str, Attach] = {
    "alone": lambda model: model,
    "ddp": DistributedDataParallel,
    "dense": _outergrad("Dense"),
    "dad": _outergrad("DAD"),
    "dad-activations": _outergrad("DAD", reveal="activations"),
    "dad-always": _outergrad("DAD", always=True),
}
