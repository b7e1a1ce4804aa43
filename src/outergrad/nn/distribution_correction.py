"""Activations are moved onto the distribution that they had in training, channel by channel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.transport import Transport
from outergrad.session.arguments import time_span
from outergrad.session.topology import opened
from outergrad.step.transport_state import end_unfinished, lost_sites_told, refuse_lost

_LEAST = 2


class DistributionCorrection(nn.Module):
    """Moves each channel of a batch onto a reference distribution, at inference, without labels.

    With F the distribution of a channel in the batch and F₀ that of the reference, a value x
    becomes

        x + λ (T(x) - x),        T = F₀⁻¹ ∘ F,

    the map that moves F onto F₀ at the least cost in one dimension. F₀⁻¹ is kept as K quantiles and
    read by linear interpolation; equal values stay equal. In training, and without a reference, a
    batch passes unchanged. NaN stays NaN. A channel that is constant in the batch takes the median
    of its reference. Ranks are counted in float32 or longer, whatever the type of the batch.

    `batches` decides whether there is a reference. So `torch.compile` breaks its graph here, and on
    an accelerator each forward waits for it.

    Place it before a norm, and read a reference from training data once the model is trained:

        model = nn.Sequential(nn.Conv2d(1, 16, 3), og.nn.DistributionCorrection(16),
                              nn.BatchNorm2d(16), nn.ReLU(), ...)
        with og.nn.collecting(model):
            for x, _ in loader:
                model(x)
        og.nn.share(model)

    Choose it where images at use are far brighter, flatter or noisier than in training, and come in
    batches of tens or more with all classes in them. It takes away what differs between batches,
    also what should: a batch of one class, or of one lesion, is made to look like the mix of
    training. Clean accuracy can fall. Compare it with a norm that uses the batch's own mean and
    variance (docs/related.md).

    Source: Fuchs, Knoll and Pernkopf, Distribution Mismatch Correction for Improved Robustness in
    Deep Neural Networks, arXiv 2110.01955.

    Args:
        channels: Channels C.
        quantiles: Quantiles K of the reference, 4 K bytes per channel.
        amount: λ, from 0 for nothing to 1 for all of the way.
        dim: Dimension of the channels in a batch.

    Attributes:
        reference: Quantiles of the reference, (C, K), at (k + ½) / K.
        batches: Batches that the reference is the mean of, a whole number; 0 for none.

    Raises:
        ValueError: a number is out of range; in forward, that a batch has other channels, or
            fewer than two values per channel, or, where a reference is read, NaN or infinities.
    """

    reference: Tensor
    batches: Tensor

    def __init__(
        self, channels: int, *, quantiles: int = 64, amount: float = 1.0, dim: int = 1
    ) -> None:
        super().__init__()
        if channels < 1 or quantiles < _LEAST:
            raise ValueError(
                f"DistributionCorrection: channels={channels}, quantiles={quantiles}; use 1 or "
                f"more channels, and {_LEAST} or more quantiles"
            )
        if not 0 <= amount <= 1:
            raise ValueError(f"DistributionCorrection: amount={amount}; use 0 to 1")
        self.amount, self.dim, self.collects = amount, dim, False
        self.register_buffer("reference", torch.zeros(channels, quantiles))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a batch whose channels are distributed as the reference."""
        if self.collects:
            self._collect(x)
            return x
        if self.training or not self.batches or not self.amount:
            return x
        values_CM = self._by_channel(x)
        moved = torch.lerp(values_CM, moved_onto(self.reference.to(x), values_CM), self.amount)
        return moved.view(x.movedim(self.dim, 0).shape).movedim(0, self.dim)

    def distance(self, x: Tensor) -> Tensor:
        """Returns each channel's Wasserstein-1 distance of a batch from the reference, (C,).

        It is ∫|F₀⁻¹ - F⁻¹|, in the unit of the activations, by K quantiles of both. A large one
        tells that a site's images differ from those of training.
        """
        values = quantiles_of(self._by_channel(x), self.reference.shape[1])
        return (values - self.reference.to(x)).abs().mean(1)

    def extra_repr(self) -> str:
        """Returns its settings."""
        channels, quantiles = self.reference.shape
        return f"{channels}, quantiles={quantiles}, amount={self.amount:g}, dim={self.dim}"

    @torch.no_grad()
    def _collect(self, x: Tensor) -> None:
        found = quantiles_of(self._by_channel(x), self.reference.shape[1]).to(self.reference)
        if not found.isfinite().all():
            raise ValueError(
                "DistributionCorrection: a batch of the reference has NaN or infinities, which "
                "would stay in it; leave that batch out"
            )
        self.batches += 1
        self.reference += (found - self.reference) / self.batches

    def _by_channel(self, x: Tensor) -> Tensor:
        values_CM = x.movedim(self.dim, 0).flatten(1)
        channels = self.reference.shape[0]
        if values_CM.shape[0] != channels or values_CM.shape[1] < _LEAST:
            raise ValueError(
                f"DistributionCorrection: a batch of shape {tuple(x.shape)}; give {channels} "
                f"channels in dimension {self.dim}, and {_LEAST} or more values of each"
            )
        return values_CM


@contextmanager
def collecting(model: nn.Module) -> Iterator[None]:
    """Lets all corrections of a model read their reference anew from the batches that pass.

    Norms and dropout are as in evaluation meanwhile; then every module has its mode again. The
    reference is the mean of the batches' quantiles.

    Args:
        model: Model with one `DistributionCorrection` or more.

    Raises:
        ValueError: the model has none.
    """
    found = _corrections(model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for one in found:
        one.reference.zero_()
        one.batches.zero_()
        one.collects = True
    try:
        yield
    finally:
        for one in found:
            one.collects = False
        for module, training in modes:
            module.training = training


def share(
    model: nn.Module,
    *,
    transport: Transport | None = None,
    group: Any = None,
    timeout: float | timedelta | None = None,
) -> int:
    """Gives all sites the mean of their references; returns the bytes of it that this site sent.

    A site's quantiles count by its number of batches; one without batches takes part with nothing.
    The mean of quantiles is the distribution nearest to those of all sites (their Wasserstein
    barycentre). Where sites differ it is not that of the pooled data, whose quantiles are no mean:
    two peaks become one between them. 4 (C K + 1) bytes per correction travel, once.

    Args:
        model: Model with one `DistributionCorrection` or more, the same at all sites.
        transport: As in `og.distribute`.
        group: As in `og.distribute`.
        timeout: As in `og.distribute`.

    Raises:
        ValueError: the model has no correction, no site has a reference, or the sites' corrections
            differ.
        RuntimeError: there is no process group.
        SiteLostError: another site does not arrive, or is gone.
    """
    found = _corrections(model)
    span = time_span(timeout)
    comm = opened(transport or TorchDistributed(), found[0].reference.device, group, span)
    refuse_lost(comm.key)
    end_unfinished(comm.key)
    lines = [f"correction {k}: {_described(one)}" for k, one in enumerate(found)]
    # Of short types the sums and counts would overflow.
    dtype = torch.promote_types(found[0].reference.dtype, torch.float32)
    weighted = [(one.reference.to(dtype) * one.batches).flatten() for one in found]
    flat = torch.cat([torch.stack([one.batches for one in found]).to(dtype), *weighted])
    with lost_sites_told(comm, "og.nn.share on all sites"):
        agree(comm, lines)
        before = comm.sent_bytes
        summed = comm.all_reduce(flat).wait()
    batches, *sums = summed.split([len(found), *map(len, weighted)])
    if not batches.all():
        raise ValueError("share: no site has a reference; pass batches in og.nn.collecting(model)")
    for one, count, total in zip(found, batches, sums, strict=True):
        one.reference.copy_(total.view_as(one.reference) / count)
        one.batches.copy_(count)
    return comm.sent_bytes - before


def quantiles_of(values_CM: Tensor, count: int) -> Tensor:
    """Returns quantiles of each row at (k + ½) / K, (C, K), by linear interpolation."""
    at = (torch.arange(count, device=values_CM.device, dtype=_exact(values_CM)) + 0.5) / count
    return _read(values_CM.sort(dim=1).values, at.expand(len(values_CM), -1))


def moved_onto(reference_CK: Tensor, values_CM: Tensor) -> Tensor:
    """Returns each value's quantile of its row in the reference; equal ones have one rank."""
    ordered, order = values_CM.contiguous().sort(dim=1)
    # Of what is sorted each rank is found beside the last one; in the order of the batch it takes
    # several times as long.
    ranks = torch.searchsorted(ordered, ordered) + torch.searchsorted(ordered, ordered, right=True)
    moved = _read(reference_CK, ranks.to(_exact(ordered)) / (2 * ordered.shape[1]))
    return torch.empty_like(moved).scatter_(1, order, moved)


def _read(ordered_CM: Tensor, share_CK: Tensor) -> Tensor:
    """Returns quantiles of rows whose m-th value is that at (m + ½) / M; ends are constant."""
    last = ordered_CM.shape[1] - 1
    place = (share_CK * (last + 1) - 0.5).clamp(0, last)
    below = place.floor().long()
    low, high = ordered_CM.gather(1, below), ordered_CM.gather(1, (below + 1).clamp(max=last))
    return torch.lerp(low, high, (place - below).to(low.dtype))


def _exact(values: Tensor) -> torch.dtype:
    """Returns a type for ranks: those of more than 2,048 values are no numbers of float16."""
    return torch.promote_types(values.dtype, torch.float32)


def _described(correction: DistributionCorrection) -> str:
    return f"{tuple(correction.reference.shape)} {correction.reference.dtype}"


def _corrections(model: nn.Module) -> list[DistributionCorrection]:
    found = [m for m in model.modules() if isinstance(m, DistributionCorrection)]
    if not found:
        raise ValueError("the model has no og.nn.DistributionCorrection; place one before a norm")
    return found
