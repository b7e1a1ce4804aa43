"""Host of chains: an `nn.Sequential`, flattened with those nested in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import nn

from outergrad.capture.class_swap import ClassSwap
from outergrad.replay.block_tap import TappedBlock
from outergrad.replay.layer import has_hooks


class _Nested(NamedTuple):
    """An `nn.Sequential` within the host, with the range of the host's parts that it holds."""

    module: nn.Sequential
    children: list[nn.Module | None]
    start: int
    stop: int


class Host:
    """An `nn.Sequential` in which chains run.

    Args:
        name: its full name.
        module: the `nn.Sequential`.

    Attributes:
        parts: full names and modules, with nested ones replaced by their contents.
    """

    def __init__(self, name: str, module: nn.Sequential) -> None:
        self._module = module
        self.parts: list[tuple[str, nn.Module]] = []
        self._nested: list[_Nested] = []
        self._chains: dict[int, tuple[TappedBlock, int]] = {}
        self._swap: ClassSwap | None = None
        self._open(name, module)

    def _open(self, name: str, module: nn.Sequential) -> None:
        """Appends a container's modules; a module that occurs twice is appended twice."""
        start = len(self.parts)
        for key, child in module._modules.items():
            assert child is not None
            full = f"{name}.{key}" if name else key
            if is_plain_sequential(child) and not has_hooks(child):
                self._open(full, child)
            else:
                self.parts.append((full, child))
        self._nested.append(_Nested(module, list(module._modules.values()), start, len(self.parts)))

    def put(self, tapped: TappedBlock, start: int, last: int) -> None:
        """Makes a chain run in place of the parts from `start` to `last`."""
        self._chains[start] = tapped, last
        if self._swap is None:
            self._swap = ClassSwap(self._module, self._forward)
            tapped.swaps.append(self._swap)

    def _forward(self, input: Any) -> Any:
        opened = [nested for nested in self._nested if self._has_chain(nested)]
        if not all(self._is_as_found(nested) for nested in opened):
            return self._as_it_is(input)
        for step in self._steps(opened):
            input = step(input)
        return input

    def _has_chain(self, nested: _Nested) -> bool:
        chains = ((start, last) for start, (_, last) in self._chains.items())
        return any(start < nested.stop and last >= nested.start for start, last in chains)

    def _is_as_found(self, nested: _Nested) -> bool:
        """True if a container holds the same modules still and no hook observes it."""
        looked_at = nested.module is not self._module and has_hooks(nested.module)
        return list(nested.module._modules.values()) == nested.children and not looked_at

    def _as_it_is(self, input: Any) -> Any:
        assert self._swap is not None
        for tapped, _ in self._chains.values():
            tapped.pass_by()
        return self._swap.plain_forward(input)

    def _steps(self, opened: Sequence[_Nested]) -> Iterator[Callable[[Any], Any]]:
        """Chains and the modules between them; a nested container without a chain is one step."""
        whole = {n.start: n for n in self._nested if n not in opened and n.start < n.stop}
        i = 0
        while i < len(self.parts):
            if i in self._chains:
                tapped, last = self._chains[i]
                yield lambda x, tapped=tapped: tapped.call(0, (x,), {})
                i = last + 1
            elif i in whole:  # the outermost one, which was added last
                yield whole[i].module
                i = whole[i].stop
            else:
                yield self.parts[i][1]
                i += 1


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """True if the module calls its children in order and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
