"""Replay of any module from its inputs; gradients are exact for all its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from outergrad.core.blocks import SentRun, SentUse, Traced
from outergrad.core.errors import ReplayError
from outergrad.core.structure import exchanged, flattened, rebuilt
from outergrad.linalg.gradients import summed, vjp
from outergrad.replay.block_use import DTYPES
from outergrad.replay.context import conditions_as, conditions_now, recorded, replayed, unchanged
from outergrad.replay.fingerprint import (
    Comparison,
    failures_told,
    fingerprint,
    never_like,
    tolerance,
)


class Forward(nn.Module):
    """Forward of a module's original class, without hooks and whatever its class is now."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self._plain = module, type(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward of the module's original class."""
        return self._plain.forward(self.module, *args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yields the arguments with their parameter names, or their index beyond these."""
        names = list(inspect.signature(self._plain.forward).parameters)[1:]
        more = [str(place) for place in range(len(names), len(args))]
        yield from zip([*names, *more], args, strict=False)
        yield from kwargs.items()

    def with_parameters(self, params: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Computes with `params` in place of the module's parameters."""
        return functional_call(self, {f"module.{n}": p for n, p in params.items()}, args, kwargs)


def other_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a description and the tensor for each buffer and tensor attribute in a module."""
    for prefix, part in module.named_modules():
        start = f"{prefix}." if prefix else ""
        for kind, tensors in (("buffer", part._buffers), ("tensor", vars(part))):
            for key, t in tensors.items():
                if isinstance(t, Tensor) and not t.is_inference():
                    yield f"the {kind} {start + key!r}", t


@contextmanager
def escapes_refused(name: str, module: nn.Module) -> Iterator[None]:
    """Context of one forward pass, after which gradients of escaped tensors raise.

    A tensor escapes if it leaves the block other than by being returned, through an attribute or a
    hook. The forward runs with detached parameters, and only its outputs are tied to them
    afterwards: the gradient of another tensor would not reach the parameters.

    Args:
        name: full name of the block.
        module: the block.
    """

    def error(way: str) -> str:
        return (
            f"block {name!r}: a tensor that left its forward through {way} has a gradient, "
            f"which would not reach the block's parameters: have the block return it, detach it, "
            f"or leave the block out of blocks="
        )

    before = {id(t) for _, _, _, t in _attributes(module)}
    hooked = [(n, m) for n, m in module.named_modules() if m is not module and m._forward_hooks]
    views = [_HookView(part, error(f"a hook on {n!r}")) for n, part in hooked]
    try:
        yield
    finally:
        for view in views:
            view.remove()
    for attribute, held, key, t in _attributes(module):
        if id(t) not in before:
            held[key] = _refused(t, error(f"the attribute {attribute!r}"))


def _refused(t: Tensor, error: str, is_free: Callable[[], bool] = lambda: False) -> Tensor:
    """Alias of `t` whose gradient is an error, unless `is_free()` in the backward pass."""
    alias = t.view_as(t)

    def refuse(delta: Tensor) -> None:
        if not is_free():
            raise RuntimeError(error)

    alias.register_hook(refuse)
    return alias


class _HookView:
    """Shows the forward hooks of a module aliases in place of its output.

    Args:
        part: the module.
        error: text of the error if an alias gets a gradient.
    """

    def __init__(self, part: nn.Module, error: str) -> None:
        self._error, self._is_free = error, False
        self._real: Any = None
        self._seen: Any = None
        first = part.register_forward_hook(self._show, prepend=True)
        self._handles = [first, part.register_forward_hook(self._hide)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _show(self, part: nn.Module, args: Any, output: Any) -> Any:
        """First hook: swaps the output for aliases."""
        try:
            tensors = flattened(output)[1]
        except TypeError:
            return None
        aliases = {id(t): self._alias(t) if t.grad_fn is not None else t for t in tensors}
        self._real, self._seen = output, exchanged(output, aliases)
        return self._seen

    def _alias(self, t: Tensor) -> Tensor:
        return _refused(t, self._error, lambda: self._is_free)

    def _hide(self, part: nn.Module, args: Any, output: Any) -> Any:
        """Last hook: swaps back, unless a hook between has replaced the output."""
        if output is self._seen:
            return self._real
        self._is_free = True
        return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Tensor]]:
    """Tensors with a graph in attributes, each as (full name, container, key, tensor)."""
    for prefix, part in module.named_modules():
        for key, value in list(vars(part).items()):
            name, held = f"{prefix}.{key}".lstrip("."), [(vars(part), key, value)]
            if type(value) in (list, dict) and key not in _OWN:
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                held = [(value, *pair) for pair in pairs]
            for where, place, t in held:
                if isinstance(t, Tensor) and t.grad_fn is not None:
                    yield name, where, place, t


_OWN = frozenset(vars(nn.Module()))


class Modules:
    """Modules whose inputs and output deltas are sent: `Replayer` of a block.

    Args:
        names: full names of the modules.
        modules: the modules.
        full_names: full names of their trained parameters, by identity.
    """

    def __init__(
        self, names: Sequence[str], modules: Sequence[nn.Module], full_names: Mapping[int, str]
    ) -> None:
        self._names, self._modules = names, modules
        self._forwards = [Forward(module) for module in modules]
        self._trained = [
            {n: full_names[id(p)] for n, p in module.named_parameters() if id(p) in full_names}
            for module in modules
        ]

    def trace(self, member: int, args: Any, kwargs: Any) -> Traced:
        """See `Replayer`.

        Raises:
            TypeError: an argument or an output cannot be sent.
            RuntimeError: the module changed a buffer or one of its inputs in place.
        """
        module, name = self._modules[member], self._names[member]
        structure, tensors = self._taken_in(member, args, kwargs)
        device = next(module.parameters()).device
        given = [(t, t._version) for t in tensors]
        held = [(n, t, t._version) for n, t in other_tensors(module)]
        detached = {n: p.detach() for n, p in module.named_parameters()}
        with recorded(device) as draws, escapes_refused(name, module):
            output = self._forwards[member].with_parameters(detached, args, kwargs)
        for n, t, version in held:
            if t._version != version:
                raise RuntimeError(
                    f"block {name!r}: its forward changes {n} in place, so other sites could not "
                    f"compute it again: leave it out of blocks="
                )
        if any(t._version != version for t, version in given):
            raise RuntimeError(
                f"block {name!r}: its forward changes one of its inputs in place, so other sites "
                f"could not compute it again: use inplace=False there, or leave it out of blocks="
            )
        about = {"in": structure, "seed": draws.seed, **conditions_now([module], device)}
        leaves = self._flattened(name, output, "it returned")[1]
        self._check_dtypes(name, [*tensors, *(t for t in leaves if t.requires_grad)])
        floating = [t for t in leaves if t.is_floating_point()]
        found = fingerprint(floating) if floating else None

        def rebuild(new: Sequence[Tensor]) -> Any:
            return exchanged(output, {id(t): n for t, n in zip(leaves, new, strict=True)})

        return Traced(about, tensors, leaves, rebuild, found)

    def _taken_in(
        self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Flattened arguments; the TypeError names the argument that cannot be sent."""
        try:
            return flattened((args, kwargs))
        except TypeError:
            for argument, value in self._forwards[member].named(args, kwargs):
                told = f"its argument {argument!r} holds"
                self._flattened(self._names[member], value, told)
            raise

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
        """See `Replayer`: bytes of inputs and outputs."""
        tensors = [*self._taken_in(member, args, kwargs)[1]]
        tensors += self._flattened(self._names[member], y, "it returned")[1]
        return sum(t.nbytes for t in {id(t): t for t in tensors}.values())

    def _flattened(self, name: str, value: Any, told: str) -> tuple[Any, list[Tensor]]:
        try:
            return flattened(value)
        except TypeError as error:
            raise TypeError(f"block {name!r}: {told} {error}; or leave it out of blocks=") from None

    def again(self, sent: SentUse, params: Mapping[str, Tensor]) -> list[Tensor]:
        """See `Replayer`."""
        with self._unchanged():
            return self._forward(sent, sent.tensors, dict(params))

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """See `Replayer`: replays one run after another, to save memory."""
        comparison = Comparison()
        with self._unchanged():
            gradients = summed(self._of_run(run, comparison) for run in runs)
        comparison.check()
        return gradients

    def fingerprints(
        self, exact: Sequence[SentRun], decoded: Sequence[SentRun]
    ) -> list[Tensor | None]:
        """See `Replayer`."""
        links = [link for run in exact for link in run.links]
        with self._unchanged():
            found = [fingerprint(y) for run in decoded for _, y in self._forwards_of(run, {})]
            odd = self._odd_member(exact)
        return [
            never_like(one) if link.member == odd else one
            for link, one in zip(links, found, strict=True)
        ]

    def _odd_member(self, runs: Sequence[SentRun]) -> int | None:
        """Index of the first module whose replay differs from its forward pass, or None."""
        comparison = Comparison()
        try:
            for run in runs:
                for link, leaves in self._forwards_of(run, {}):
                    self._compare(run, link, leaves, comparison)
            comparison.check()
        except ReplayError as error:
            return error.member
        return None

    def _unchanged(self) -> AbstractContextManager[None]:
        return unchanged(self._modules, next(self._modules[0].parameters()).device)

    def _forwards_of(
        self, run: SentRun, copies: dict[str, Tensor]
    ) -> Iterator[tuple[SentUse, list[Tensor]]]:
        """Yields each use with its floating outputs, which have a graph to `copies`."""
        entry = None
        for link in run.links:
            tensors = [entry if t is None else t for t in link.tensors]
            with failures_told(run.site, link.member):
                leaves = self._forward(link, tensors, copies)
            yield link, leaves
            entry = leaves[0]

    def _of_run(self, run: SentRun, comparison: Comparison) -> dict[str, Tensor]:
        """Gradients of one run: forward through all uses, then back from the last one's deltas."""
        copies: dict[str, Tensor] = {}
        leaves, member = list[Tensor](), run.links[-1].member
        for link, leaves in self._forwards_of(run, copies):
            self._compare(run, link, leaves, comparison)
        with failures_told(run.site, member):
            return self._backward(leaves, run.deltas, copies)

    def _compare(
        self, run: SentRun, link: SentUse, leaves: Sequence[Tensor], comparison: Comparison
    ) -> None:
        module = self._modules[link.member]
        known = [*leaves, *(t for t in link.tensors if t is not None), *module.parameters()]
        dtypes = {t.dtype for t in known}
        if link.about["autocast"] is not None:
            dtypes.add(getattr(torch, link.about["autocast"]))
        room = tolerance(dtypes, leaves[0].device, same_machine=run.own)
        assert link.fingerprint is not None
        comparison.note(run.site, link.member, link.fingerprint, fingerprint(leaves), room)

    def _backward(
        self, leaves: Sequence[Tensor], deltas: Sequence[Tensor], copies: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        found = zip(copies, vjp(leaves, list(copies.values()), deltas), strict=True)
        return _apart({name: g for name, g in found if g is not None}, deltas)

    def _forward(
        self, link: SentUse, tensors: Sequence[Tensor | None], copies: dict[str, Tensor]
    ) -> list[Tensor]:
        """Floating outputs, with a graph to copies of the parameters, which it adds to `copies`."""
        module, trained = self._modules[link.member], self._trained[link.member]
        about, device = link.about, next(module.parameters()).device
        used = {n: p.detach() for n, p in module.named_parameters()}
        for n, full in trained.items():
            used[n] = copies.setdefault(full, used[n].requires_grad_())
        args, kwargs = rebuilt(about["in"], tensors)  # type: ignore[arg-type]
        seeded, conditions = replayed(about["seed"], device), conditions_as(about, [module], device)
        with torch.enable_grad(), seeded, conditions:
            output = self._forwards[link.member].with_parameters(used, args, kwargs)
        return [t for t in flattened(output)[1] if t.is_floating_point()]


def _apart(gradients: Mapping[str, Tensor], deltas: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients in separate memory: autograd may return a delta, or one tensor twice."""
    seen = {d.untyped_storage().data_ptr() for d in deltas}
    apart: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        place = gradient.untyped_storage().data_ptr()
        sizes = zip(gradient.shape, gradient.stride(), strict=True)
        expanded = any(size > 1 and not stride for size, stride in sizes)
        apart[name] = gradient.clone() if expanded or place in seen else gradient
        seen.add(place)
    return apart
