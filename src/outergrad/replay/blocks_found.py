"""Search of a model for the parts that all sites replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from outergrad.capture.class_swap import ClassSwap
from outergrad.core.blocks import Block
from outergrad.core.compressor import Compressor
from outergrad.replay.block_tap import FoundBlock, TappedBlock
from outergrad.replay.chain import Chain
from outergrad.replay.host import Host, is_plain_sequential
from outergrad.replay.layer import Between, ChainLayer, chains_in, has_hooks, is_layer
from outergrad.replay.modules import Modules

_RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


class BlockFinder:
    """Finds the blocks that one compressor asks for.

    Args:
        model: the model.
        compressor: its `replays` says which blocks; its `wire` gives their codecs.
        full_names: full names of the compressor's trained parameters, by identity.
        hosts: hosts of chains, by identity of the module. Compressors may share one.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor,
        full_names: Mapping[int, str],
        hosts: dict[int, Host],
    ) -> None:
        self._replays, self._full_names, self._hosts = compressor.replays, full_names, hosts
        self._codecs, self._modules = compressor.wire, dict(model.named_modules())
        every = model.named_parameters(remove_duplicate=False)
        self._times = Counter(id(p) for _, p in every)
        self.owned: set[int] = set()

    def found(self) -> Iterator[FoundBlock]:
        """Yields the blocks, starting with those named in `blocks`.

        Raises:
            ValueError: a named module cannot be replayed by other sites.
        """
        for group in _siblings(self._named()):
            yield self._of_modules(group, explicit=True)
        if self._replays.recurrent:
            for name, module in self._modules.items():
                if type(module) in _RECURRENT and self._is_fit(module) and self._reads_made(module):
                    yield self._of_modules([name], explicit=False)
        if self._replays.chains:
            yield from self._chains()

    # -- modules --------------------------------------------------------------------------------

    def _named(self) -> list[str]:
        """Names that match a pattern, in model order, without modules inside other matches."""
        names: list[str] = []
        for pattern in self._replays.blocks:
            matching = [n for n in self._modules if n and fnmatchcase(n, pattern)]
            if not matching:
                raise ValueError(
                    f"EDAD: blocks={pattern!r} matches no module; they are "
                    f"{', '.join(name for name in self._modules if name)}"
                )
            names += matching
        ordered = [name for name in self._modules if name in names]
        return [n for n in ordered if not any(n.startswith(f"{other}.") for other in ordered)]

    def _of_modules(self, names: Sequence[str], *, explicit: bool) -> FoundBlock:
        modules = [self._modules[name] for name in names]
        if explicit:
            for name, module in zip(names, modules, strict=True):
                self._check(name, module)
        self._own(modules)
        params_of = tuple(self._params([module]) for module in modules)
        params = tuple(dict.fromkeys(name for params in params_of for name in params))
        label = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        return FoundBlock(
            Block(label, params),
            names=tuple(names),
            modules_of=[(module,) for module in modules],
            params_of=params_of,
            replayer=Modules(names, modules, self._full_names),
            codecs=self._codecs,
            explicit=explicit,
            raw_inputs=self._replays.raw_inputs,
            swap=partial(_swap_each, modules),
        )

    def _check(self, name: str, module: nn.Module) -> None:
        for child, part in module.named_modules(prefix=name):
            if getattr(part, "track_running_stats", False):
                raise ValueError(
                    f"EDAD: {child!r} ({type(part).__name__}) keeps running statistics, so block "
                    f"{name!r} cannot be computed again by other sites: use GroupNorm or "
                    f"LayerNorm, or leave it out of blocks="
                )
            if id(part) in self.owned and any(True for _ in part.parameters()):
                raise ValueError(f"EDAD: {child!r} belongs to several of blocks=")
        parameters = dict(module.named_parameters(prefix=name))
        if not any(id(p) in self._full_names for p in parameters.values()):
            raise ValueError(f"EDAD: block {name!r} has no trained parameter of this method")
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        for full, p in parameters.items():
            if p.requires_grad and id(p) not in self._full_names:
                raise ValueError(f"EDAD: {full!r} in block {name!r} has another method")
            if self._times[id(p)] != inside[id(p)]:
                raise ValueError(
                    f"EDAD: {full!r} in block {name!r} is tied to a parameter outside: leave the "
                    f"block out of blocks="
                )

    def _is_fit(self, module: nn.Module) -> bool:
        """True if a module that `blocks` does not name can be replayed."""
        params = list(module.parameters())
        plain = all(id(p) in self._full_names and self._times[id(p)] == 1 for p in params)
        return id(module) not in self.owned and plain and bool(params) and not _is_computed(module)

    def _reads_made(self, module: nn.Module) -> bool:
        """True if the module's input may be sent.

        The owner of the first trained parameter reads the raw data, which stay on their site.
        """
        first = next(iter(self._full_names))
        return self._replays.raw_inputs or all(id(p) != first for p in module.parameters())

    def _own(self, modules: Sequence[nn.Module]) -> None:
        self.owned |= {id(part) for module in modules for part in module.modules()}

    def _params(self, modules: Sequence[nn.Module]) -> tuple[str, ...]:
        params = (p for module in modules for p in module.parameters())
        return tuple(dict.fromkeys(self._full_names[id(p)] for p in params if p.requires_grad))

    # -- chains ---------------------------------------------------------------------------------

    def _chains(self) -> Iterator[FoundBlock]:
        seen: set[int] = set()
        for name, module in self._modules.items():
            if is_plain_sequential(module) and id(module) not in seen | self.owned:
                host = self._hosts.setdefault(id(module), Host(name, module))
                seen |= {id(m) for m in module.modules() if isinstance(m, nn.Sequential)}
                yield from self._chains_of(host)

    def _chains_of(self, host: Host) -> Iterator[FoundBlock]:
        usable = [module if self._may_chain(module) else None for _, module in host.parts]
        for first, last in chains_in(usable):
            start = first if self._replays.raw_inputs else _next_layer(usable, first)
            if start < last:
                yield self._chain(host, start, last)

    def _may_chain(self, module: nn.Module) -> bool:
        return not has_hooks(module) and (not list(module.parameters()) or self._is_fit(module))

    def _chain(self, host: Host, start: int, last: int) -> FoundBlock:
        names, modules = zip(*host.parts[start : last + 1], strict=True)
        self._own(modules)
        layers: list[ChainLayer] = []
        between: list[list[nn.Module]] = []
        for module in modules:
            if is_layer(module):
                layers.append(module)
                between.append([])
            else:
                between[-1].append(module)
        spaces = [Between(tuple(part)) for part in between[:-1]]
        params = self._params(modules)
        label = f"{names[0]} ... {names[-1]}"
        return FoundBlock(
            Block(label, params),
            names=(label,),
            modules_of=[modules],
            params_of=[params],
            replayer=Chain(layers, spaces, self._full_names, exact=not self._codecs),
            codecs=self._codecs,
            explicit=False,
            raw_inputs=True,
            swap=lambda tapped: host.put(tapped, start, last),
        )


def _swap_each(modules: Sequence[nn.Module], tapped: TappedBlock) -> None:
    for k, module in enumerate(modules):
        tapped.swaps.append(ClassSwap(module, _member(tapped, k)))


def _member(tapped: TappedBlock, member: int) -> Any:
    return lambda *args, **kwargs: tapped.call(member, args, kwargs)


def _siblings(names: Sequence[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return list(groups.values())


def _is_computed(module: nn.Module) -> bool:
    """True if a weight is computed from others, e.g. by `weight_norm`."""
    return any(name == "parametrizations" for name, _ in module.named_modules())


def _next_layer(modules: Sequence[nn.Module | None], first: int) -> int:
    return next(i for i in range(first + 1, len(modules)) if is_layer(modules[i]))
