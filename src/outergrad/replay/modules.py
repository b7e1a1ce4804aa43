"""Any module, computed again from its inputs: exact for all its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outergrad._blocks import Sent, SentRun, Traced
from outergrad.replay.autocast import autocast_as, autocast_now
from outergrad.replay.modes import modes_as, modes_now
from outergrad.replay.run import DTYPES
from outergrad.replay.streams import recorded, replayed
from outergrad.replay.structure import flattened, rebuilt
from outergrad.replay.sums import summed


class Modules:
    """Modules whose inputs and output deltas are sent: `Replayer` of a block.

    Args:
        names: full names of the modules.
        modules: the modules.
        full_names: of their trained parameters, by identity.
    """

    def __init__(
        self, names: Sequence[str], modules: Sequence[nn.Module], full_names: Mapping[int, str]
    ) -> None:
        self._names, self._modules = names, modules
        self._forwards = [_Forward(module) for module in modules]
        self._trained = [
            {n: full_names[id(p)] for n, p in module.named_parameters() if id(p) in full_names}
            for module in modules
        ]

    def trace(self, member: int, args: Any, kwargs: Any) -> Traced:
        """See `Replayer`.

        Raises:
            TypeError: an argument cannot be sent, or an output.
            RuntimeError: the module changed a buffer, or what it was given.
        """
        module, name = self._modules[member], self._names[member]
        structure, tensors = self._flattened(name, (args, kwargs))
        device = next(module.parameters()).device
        given = [(t, t._version) for t in tensors]
        buffers = {n: (b, b._version) for n, b in module.named_buffers()}
        detached = {n: p.detach() for n, p in module.named_parameters()}
        with recorded(device) as draws:
            output = self._forwards[member].with_parameters(detached, args, kwargs)
        for n, (buffer, version) in buffers.items():
            if buffer._version != version:
                raise RuntimeError(
                    f"block {name!r}: its forward changes the buffer {n!r}, so other sites could "
                    f"not compute it again: leave it out of blocks="
                )
        if any(t._version != version for t, version in given):
            raise RuntimeError(
                f"block {name!r}: its forward changes one of its inputs in place, so other sites "
                f"could not compute it again: use inplace=False there, or leave it out of blocks="
            )
        about = {"in": structure, "seed": draws.seed, "autocast": autocast_now(device)}
        about["training"] = modes_now([module])
        shape, leaves = self._flattened(name, output)
        self._check_dtypes(name, [*tensors, *(t for t in leaves if t.requires_grad)])
        return Traced(about, tensors, leaves, lambda new: rebuilt(shape, new))

    def _check_dtypes(self, name: str, tensors: Sequence[Tensor]) -> None:
        odd = next((t.dtype for t in tensors if t.dtype not in DTYPES), None)
        if odd is not None:
            raise TypeError(
                f"block {name!r}: it reads or returns a tensor of {odd}, which cannot be sent: "
                f"leave it out of blocks="
            )

    def may_trace(self, member: int) -> bool:
        """See `Replayer`."""
        return True

    def plain(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Replayer`."""
        return self._forwards[member](*args, **kwargs)

    def nbytes(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> int:
        """See `Replayer`: inputs and outputs."""
        tensors = self._flattened(self._names[member], ((args, kwargs), y))[1]
        return sum(t.nbytes for t in tensors)

    def _flattened(self, name: str, value: Any) -> tuple[Any, list[Tensor]]:
        try:
            return flattened(value)
        except TypeError as error:
            raise TypeError(f"block {name!r}: {error}; or leave it out of blocks=") from None

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """See `Replayer`: one run after the other, for their memory."""
        return summed(self._of_run(*run) for run in runs)

    def _of_run(self, links: Sequence[Sent], deltas: Sequence[Tensor]) -> dict[str, Tensor]:
        """Forward through all links, then back from the deltas of the last."""
        copies: dict[str, Tensor] = {}
        entry, leaves = None, list[Tensor]()
        for link in links:
            tensors = [entry if t is None else t for t in link.tensors]
            leaves = self._forward(link, tensors, copies)
            entry = leaves[0]
        pairs = [(y, d) for y, d in zip(leaves, deltas, strict=True) if y.requires_grad]
        if not pairs:
            return {}
        names, wanted = list(copies), list(copies.values())
        outputs, grad_outputs = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True)
        gradients = {n: g for n, g in zip(names, found, strict=True) if g is not None}
        return _apart(gradients, deltas)

    def _forward(
        self, link: Sent, tensors: Sequence[Tensor | None], copies: dict[str, Tensor]
    ) -> list[Tensor]:
        """The floating outputs, with a graph to copies of the parameters, which it adds."""
        module, trained = self._modules[link.member], self._trained[link.member]
        about, device = link.about, next(module.parameters()).device
        used = {n: p.detach() for n, p in module.named_parameters()}
        for n, full in trained.items():
            used[n] = copies.setdefault(full, used[n].requires_grad_())
        args, kwargs = rebuilt(about["in"], tensors)  # type: ignore[arg-type]
        modes, seeded = modes_as([module], about["training"]), replayed(about["seed"], device)
        with torch.enable_grad(), seeded, modes, autocast_as(about["autocast"], device):
            output = self._forwards[link.member].with_parameters(used, args, kwargs)
        return [t for t in flattened(output)[1] if t.is_floating_point()]


def _apart(gradients: Mapping[str, Tensor], deltas: Sequence[Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own: autograd may return a delta, or one tensor for two parameters."""
    seen = {d.untyped_storage().data_ptr() for d in deltas}
    apart: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        place = gradient.untyped_storage().data_ptr()
        sizes = zip(gradient.shape, gradient.stride(), strict=True)
        expanded = any(size > 1 and not stride for size, stride in sizes)
        apart[name] = gradient.clone() if expanded or place in seen else gradient
        seen.add(place)
    return apart


class _Forward(nn.Module):
    """The forward of a module's own class, without its hooks and whatever its class is now."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._plain = module, type(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain.forward(self.module, *args, **kwargs)

    def with_parameters(self, params: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Computes with these in the place of the parameters."""
        return functional_call(self, {f"module.{n}": p for n, p in params.items()}, args, kwargs)
