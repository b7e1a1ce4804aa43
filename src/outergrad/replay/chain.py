"""edAD for a chain of layers: sends all activations but only the last delta.

The other deltas follow by replay. With A_l the input of layer l, y_l its output and A_{l+1} =
f_l(y_l) the result of the functions between, every site computes the deltas of all rows from the
shared weights,

    delta_l = f_l'(y_l) * (delta_{l+1} W_{l+1}),        dW_l = delta_lᵀ A_l,

with f' taken from A_{l+1} where that is enough. Source: Baker et al., arXiv 2102.09631 (edAD).
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outergrad.core.blocks import SentRun, SentUse, Traced
from outergrad.core.errors import ReplayError
from outergrad.linalg.gradients import summed
from outergrad.replay.context import conditions_as, conditions_now, recorded, replayed
from outergrad.replay.fingerprint import Comparison, fingerprint, tolerance
from outergrad.replay.layer import (
    Between,
    ChainLayer,
    backward,
    delta_before,
    has_hooks,
    is_batched,
    output,
)


class Chain:
    """Layers of an `nn.Sequential` whose activations are sent: `Replayer` of a block.

    Args:
        layers: the layers, in order, with or without a bias.
        between: the modules between each pair of consecutive layers.
        full_names: full names of the trained parameters, by identity.
        exact: True if receivers get the activations without loss.
    """

    def __init__(
        self,
        layers: Sequence[ChainLayer],
        between: Sequence[Between],
        full_names: Mapping[int, str],
        *,
        exact: bool = True,
    ) -> None:
        self._layers, self._between, self._full_names = layers, between, full_names
        self._exact = exact
        parts = zip(layers, [*between, Between(())], strict=True)
        self.modules = [m for layer, part in parts for m in (layer, *part.modules)]
        self._params = {id(p): p for module in self.modules for p in module.parameters()}
        self._device = layers[0].weight.device

    def trace(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        """See `Replayer`: sends the activations of every layer; returns the last layer's output."""
        (x,) = args
        detached = {key: p.detach() for key, p in self._params.items()}
        activations, seeds = [x], list[str | None]()
        y = output(self._layers[0], x, detached)
        shapes = [tuple(y.shape)]
        for layer, between in zip(self._layers[1:], self._between, strict=True):
            a, seed = self._through(between, y, detached)
            activations.append(a)
            seeds.append(seed)
            y = output(layer, activations[-1], detached)
            shapes.append(tuple(y.shape))
        about = {"seeds": seeds, "shapes": shapes, **conditions_now(self.modules, self._device)}
        about["settings"] = self._settings()
        return Traced(about, activations, [y], lambda new: new[0])

    def _settings(self) -> str:
        """Digest of all modules' settings, as text of fixed length; sites must agree on it."""
        told = [
            # PyTorch's layers list their settings in `__constants__`.
            [getattr(m, name, None) for name in getattr(m, "__constants__", ())]
            for m in self.modules
        ]
        return f"{zlib.crc32(repr(told).encode()):08x}"

    def _through(
        self, between: Between, y: Tensor, params: Mapping[int, Tensor]
    ) -> tuple[Tensor, str | None]:
        """Returns the next activations and the seed of their random numbers, if any were drawn."""
        if between.is_known:
            return between(y, params), None
        with recorded(self._device) as draws:
            a = between(y, params)
        return a, draws.seed

    def may_trace(self, member: int) -> bool:
        """See `Replayer`: False while a module has hooks, which a trace would bypass."""
        return not any(map(has_hooks, self.modules))

    def plain(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Replayer`."""
        (y,) = args
        for module in self.modules:
            y = module(y)
        return y

    def nbytes(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> int:
        """See `Replayer`: counts the elements per row that all layers read and the last returns.

        Exact for linear layers; for convolutions, the number of positions of the first one is taken
        for all.
        """
        (x,) = args
        first = self._layers[0].weight.shape[1] * getattr(self._layers[0], "groups", 1)
        widths = [m.weight.shape[1] * getattr(m, "groups", 1) for m in self._layers]
        return x.nbytes * sum(widths) // max(first, 1) + y.nbytes

    def again(self, sent: SentUse, params: Mapping[str, Tensor]) -> list[Tensor]:
        """See `Replayer`: replays from the block's input, so that all parts have a graph."""
        names = self._full_names  # a frozen parameter has no name here
        used = {key: params.get(names.get(key, ""), p.detach()) for key, p in self._params.items()}
        (a, *_), about, device = sent.tensors, sent.about, self._device
        assert a is not None
        with conditions_as(about, self.modules, device):
            y = output(self._layers[0], a, used)
            parts = zip(self._layers[1:], self._between, about["seeds"], strict=True)
            for layer, between, seed in parts:
                with replayed(seed, device):
                    a = between(y, used)
                y = output(layer, a, used)
        return [y]

    def gradients(self, runs: Sequence[SentRun]) -> dict[str, Tensor]:
        """See `Replayer`: stacks the rows of all sites where no random numbers are drawn."""
        for run in runs:
            if run.links[0].about["settings"] != self._settings():
                raise ReplayError(run.site, 0)
        together = [_stacked(runs)] if self._may_stack(runs) else runs
        comparison = Comparison()
        gradients = summed(self._of_run(run, comparison) for run in together)
        comparison.check()
        return gradients

    def fingerprints(
        self, exact: Sequence[SentRun], decoded: Sequence[SentRun]
    ) -> list[Tensor | None]:
        """See `Replayer`: a chain sends none."""
        return [None for run in exact for _ in run.links]

    def _may_stack(self, runs: Sequence[SentRun]) -> bool:
        """True if the runs differ in their row counts alone and no module mixes rows or draws."""
        alike = {_all_but_rows(run) for run in runs}
        about = runs[0].links[0].about if runs else {}
        if len(runs) < 2 or len(alike) > 1 or any(seed is not None for seed in about["seeds"]):
            return False
        batched = map(is_batched, self._layers, about["shapes"])
        return all(batched) and all(between.keeps_rows_apart for between in self._between)

    def _of_run(self, run: SentRun, comparison: Comparison) -> dict[str, Tensor]:
        """Gradients of one run: the backward pass from the last layer's delta."""
        (link,), (d,) = run.links, run.deltas
        detached = {key: p.detach() for key, p in self._params.items()}
        found: dict[int, Tensor] = {}
        with conditions_as(link.about, self.modules, self._device):
            for k in reversed(range(len(self._layers))):
                a = link.tensors[k]
                assert a is not None
                d = d.reshape(link.about["shapes"][k])
                d = backward(self._layers[k], a, d, found, inputs=k > 0)
                if k:
                    d, again = self._before(k - 1, link, d, detached, found)
                    self._compare(run, k, again, comparison)
        names = self._full_names
        return {names[key]: gradient for key, gradient in found.items() if key in names}

    def _compare(self, run: SentRun, k: int, again: Tensor | None, comparison: Comparison) -> None:
        """Notes redrawn activations for comparison: devices may draw different random numbers."""
        link, sent = run.links[0], run.links[0].tensors[k]
        if again is None or sent is None or link.about["seeds"][k - 1] is None or not self._exact:
            return
        dtypes = {again.dtype, sent.dtype, self._layers[k - 1].weight.dtype}
        room = tolerance(dtypes, again.device, same_machine=run.own)
        comparison.note(run.site, 0, fingerprint([sent]), fingerprint([again]), room)

    def _before(
        self,
        k: int,
        link: SentUse,
        d: Tensor,
        params: Mapping[int, Tensor],
        found: dict[int, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the delta of the output of layer k, given the delta of the next layer's input.

        Also returns the activations that the functions between give now, where these had to be
        computed.
        """
        between, (a, after) = self._between[k], link.tensors[k : k + 2]
        assert a is not None
        assert after is not None
        if between.is_known:
            for module in reversed(between.modules):
                d = delta_before(module, after, d)
            return d, None
        seed = link.about["seeds"][k]
        own = [p for module in between.modules for p in module.parameters()]
        copies = {id(p): params[id(p)].detach().requires_grad_() for p in own}
        y = output(self._layers[k], a, params).detach().requires_grad_()
        with torch.enable_grad(), replayed(seed, self._device):
            made = between(y.clone(), copies)
        inputs = [y, *copies.values()]
        d, *gradients = torch.autograd.grad(made, inputs, d.view(made.shape).to(made.dtype))
        found.update(zip(copies, gradients, strict=True))
        return d, made.detach()


def _all_but_rows(run: SentRun) -> Hashable:
    """Properties that runs must share for their rows to be computed together."""
    (link,), (delta,) = run.links, run.deltas
    about = link.about
    drawn = tuple(seed is not None for seed in about["seeds"])
    shapes = [tuple(t.shape[1:]) for t in link.tensors if t is not None]
    shapes += [tuple(shape[1:]) for shape in about["shapes"]]
    return about["autocast"], str(about["training"]), drawn, delta.dtype, tuple(shapes)


def _stacked(runs: Sequence[SentRun]) -> SentRun:
    links = [run.links[0] for run in runs]
    columns = zip(*(link.tensors for link in links), strict=True)
    tensors = [torch.cat([t for t in column if t is not None]) for column in columns]
    firsts = zip(*(link.about["shapes"] for link in links), strict=True)
    shapes = [(sum(shape[0] for shape in of_sites), *of_sites[0][1:]) for of_sites in firsts]
    about = {**links[0].about, "shapes": shapes}
    deltas = torch.cat([run.deltas[0] for run in runs])
    return SentRun([SentUse(links[0].member, about, tensors)], [deltas])
