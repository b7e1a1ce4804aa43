"""Gradients by perturbed weights, of which only derivatives travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from outergrad.comm.agree import agree
from outergrad.comm.process_group import TorchDistributed
from outergrad.core.transport import Transport
from outergrad.forward.one_at_a_time import differentiated
from outergrad.forward.signs import signs
from outergrad.messages.raw import from_raw, raw
from outergrad.session.arguments import time_span
from outergrad.session.topology import opened
from outergrad.step.transport_state import end_unfinished, lost_sites_told, refuse_lost

_STEP_BYTES = 8
_ABSENT = -1
"""In place of the step: the site that sends it has no derivatives."""
CHUNK = 32
"""Directions along which one pass differentiates: more of them need more memory."""


class SeededGradients:
    """Trains replicas that exchange a few numbers per step: seeds and scalars.

    In a step every site draws K directions v_k for all weights and finds the derivatives
    s_k = ∂loss/∂v_k by forward differentiation. It sends the s_k alone. All sites draw the
    directions of all sites again, from the seed, the step and the number of the site, and form

        ĝ = 1/(S K) Σ_sites Σ_k s_k v_k

    whose mean over the directions is the mean gradient over the sites. For a matrix, v = u wᵀ with
    signs u (O) and w (I): only O + I of them are drawn, and the sum is a product of thin factors,
    (s ⊙ U)ᵀ W. With independent signs in all places the variance would be the same:

        E‖ĝ - g‖² = (d - 1) / (S K) · ‖g‖²        for d weights behind one loss.

    So it pays to have several losses, each of few weights (`LocalMixer.owners`): L losses take L
    numbers per direction, and are as exact as L directions of a single loss, in one pass.

    Choose it for small models over links of some hundred bytes per step. A step learns from S K
    numbers however large the model is, so compare with `og.RankDAD` and `og.Sparse` first, in bytes
    until a loss. Computing and drawing grow with S K. The numbers are inner products with the
    site's gradient: many of them tell what the gradient tells (docs/privacy.md).

    Sites that compute alike have replicas that are equal to the bit. Machines of different kinds
    may round sums differently, so that replicas drift apart by rounding, in silence. Directions are
    drawn on the host, so they are the same on any device.

    Sites count alike. For a site that counts by a weight w_s, multiply its losses by S w_s / Σ w.

        gradients = og.forward.SeededGradients(model, losses, draws=100, seed=0)
        for x, y in loader:
            loss = gradients.step(x, y)
            optimizer.step()

    Source: Baydin et al., Gradients without Backpropagation, arXiv 2202.08587, for the estimate;
    Ren et al., arXiv 2210.03310, for several losses.

    Args:
        model: The replica; rank 0's weights overwrite those of all other sites. Parameters that
            require no gradient, and buffers, stay each site's own.
        losses: Called with the model and a batch; returns L losses, (L,), or one, (): as many at
            all sites and in all steps. It must not write to buffers, as norms with running
            statistics do, draw random numbers, as dropout does, or wait for another site. All its
            operations need a forward derivative, which PyTorch has not for `nn.LSTM` on a CPU nor
            for fused attention (`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` has one).
        draws: Directions K per site and step.
        seed: Common seed of all sites.
        owners: For a parameter's name which losses each of its rows (first dimension) moves, 0 or
            1, (L, rows). Without it every loss moves every weight.
        transport: As in `og.distribute`.
        group: As in `og.distribute`.
        timeout: As in `og.distribute`.

    Attributes:
        taken: Steps so far. Set it when a training goes on from a checkpoint.

    Raises:
        ValueError: a setting is out of range, nothing is to be trained, or sites differ.
        RuntimeError: there is no process group.
        SiteLostError: another site does not arrive, or is gone.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[..., Tensor],
        *,
        draws: int,
        seed: int,
        owners: Mapping[str, Tensor] | None = None,
        transport: Transport | None = None,
        group: Any = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        if draws < 1:
            raise ValueError(f"SeededGradients: draws={draws}; use 1 or more")
        self._params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._params:
            raise ValueError("SeededGradients: no parameter of the model requires a gradient")
        _refuse_strange(owners or {}, self._params)
        self._losses, self._owners = _Losses(model, losses), dict(owners or {})
        self._draws, self._seed, self.taken = draws, seed, 0
        self._agreed: tuple[int, torch.dtype] | None = None
        """Number L of losses and type of their derivatives at all sites, once a step has told."""
        device, span = next(iter(self._params.values())).device, time_span(timeout)
        self._comm = opened(transport or TorchDistributed(), device, group, span)
        with self._together("SeededGradients on all sites"):
            agree(self._comm, self._described())
            for p in self._params.values():
                self._comm.broadcast(p.data)
        self._sent_before = self._comm.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that this site has sent in all steps so far, agreements before them left out."""
        return self._comm.sent_bytes - self._sent_before

    def step(self, *batch: Any) -> Tensor:
        """Writes the mean gradient over all sites to every `param.grad`; returns own losses.

        Every site calls it equally often, with a batch of its own. A gradient that is there is
        replaced.

        No site changes a gradient if one raises.

        Raises:
            SiteLostError: another site is lost; it is named.
            RuntimeError: the sites are at different steps, or another site could not take part.
            ValueError: derivatives of a site are not finite, or the number of losses is not that
                of the owners, of the other sites, or of the steps before.
            Exception: what the losses of this site raise, after the others have been told.
        """
        rank, sites = self._comm.rank, self._comm.world_size
        drawn = [self._drawn(site) for site in range(sites)]
        try:
            losses_L, s_KL = self._derivatives(drawn[rank], batch)
            self._refuse_other_losses(s_KL)
        except Exception as error:
            with self._together("derivatives"):
                self._tell(error)
            raise
        with self._together("derivatives"):
            if self._agreed is None:
                self._agree(s_KL)
            s_SKL = self._exchanged(s_KL)
        for name, p in self._params.items():
            p.grad = self._gradient(name, p, [d[name] for d in drawn], s_SKL)
        self.taken += 1
        return losses_L

    @contextmanager
    def _together(self, place: str) -> Iterator[None]:
        """Context of an exchange, behind those of sessions on the transport."""
        refuse_lost(self._comm.key)
        end_unfinished(self._comm.key)
        with lost_sites_told(self._comm, place, self.taken):
            yield

    def _drawn(self, site: int) -> dict[str, _Directions]:
        return {
            name: _Directions.drawn(p, self._draws, self._seed, self.taken, site, k)
            for k, (name, p) in enumerate(self._params.items())
        }

    def _derivatives(
        self, drawn: Mapping[str, _Directions], batch: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses, (L,), and their derivatives along the site's directions, (K, L)."""
        params = {name: p.detach() for name, p in self._params.items()}

        def of(params: dict[str, Tensor]) -> Tensor:
            named = {f"model.{name}": p for name, p in params.items()}
            return functional_call(self._losses, named, batch).reshape(-1)

        def along(factors: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
            tangents = {n: torch.outer(u, w).view_as(params[n]) for n, (u, w) in factors.items()}
            found = jvp(of, (params,), (tangents,))
            return found[0], found[1]

        factors = {name: (one.u_KO, one.w_KI) for name, one in drawn.items()}
        losses_KL, s_KL = differentiated(lambda: vmap(along, chunk_size=CHUNK)(factors))
        return losses_KL[0], s_KL

    def _refuse_other_losses(self, s_KL: Tensor) -> None:
        losses = s_KL.shape[1]
        for name, owned in self._owners.items():
            if len(owned) != losses:
                raise ValueError(
                    f"SeededGradients: {losses} losses, and owners of {name!r} for {len(owned)}; "
                    f"give one row of owners per loss"
                )
        if self._agreed not in (None, (losses, s_KL.dtype)):
            raise ValueError(
                f"SeededGradients: {losses} losses of {s_KL.dtype} where earlier steps had "
                f"{self._agreed[0]} of {self._agreed[1]}; return as many for every batch"
            )

    def _agree(self, s_KL: Tensor) -> None:
        """Makes sure that all messages are of one length, before the first of them."""
        self._compare([f"losses: {s_KL.shape[1]} of {s_KL.dtype}"])
        self._agreed = s_KL.shape[1], s_KL.dtype

    def _compare(self, lines: list[str], error: Exception | None = None) -> None:
        before = self._comm.sent_bytes
        try:
            agree(self._comm, lines, error, "return as many losses of one type at every site")
        finally:
            self._sent_before += self._comm.sent_bytes - before

    def _tell(self, error: Exception) -> None:
        """Takes part in the exchange of this step, without derivatives."""
        if self._agreed is None:
            self._compare([], error)
            return
        losses, dtype = self._agreed
        self._gathered(_ABSENT, torch.zeros(self._draws, losses, dtype=dtype))

    def _gathered(self, step: int, s_KL: Tensor) -> list[tuple[int, Tensor]]:
        """Returns the step and the derivatives that each site has sent."""
        comm = self._comm
        own = torch.cat([raw(torch.tensor([step])), raw(s_KL.cpu())]).to(comm.device)
        messages = [m.cpu() for m in comm.all_gather(own, [len(own)] * comm.world_size).wait()]
        return [
            (
                int(from_raw(message[:_STEP_BYTES], torch.int64, torch.Size(()))),
                from_raw(message[_STEP_BYTES:], s_KL.dtype, s_KL.shape),
            )
            for message in messages
        ]

    def _exchanged(self, s_KL: Tensor) -> Tensor:
        """Returns the derivatives of all sites, (S, K, L)."""
        sites = self._comm.sites
        steps, found = zip(*self._gathered(self.taken, s_KL), strict=True)
        for site, step in zip(sites, steps, strict=True):
            if step == _ABSENT:
                raise RuntimeError(
                    f"SeededGradients: {site.called} has no derivatives for step {self.taken}, "
                    f"which changes no gradient; the reason is in its own error"
                )
            if step != self.taken:
                raise RuntimeError(
                    f"SeededGradients: {site.called} is at step {step}, this site at "
                    f"{self.taken}: load the same checkpoint everywhere, and set `taken`"
                )
        for site, one in zip(sites, found, strict=True):
            if not one.isfinite().all():
                raise ValueError(
                    f"SeededGradients: derivatives of {site.called} are not finite in step "
                    f"{self.taken}; use a smaller learning rate, or look at its batch"
                )
        return torch.stack(found).to(s_KL.device)

    def _gradient(
        self, name: str, p: nn.Parameter, drawn: list[_Directions], s_SKL: Tensor
    ) -> Tensor:
        s_RL = s_SKL.flatten(0, 1)
        u_RO, w_RI = torch.cat([d.u_KO for d in drawn]), torch.cat([d.w_KI for d in drawn])
        owned = self._owners.get(name)
        scale = s_RL.sum(1, keepdim=True) if owned is None else s_RL @ owned.to(s_RL)
        dtype = torch.promote_types(p.dtype, scale.dtype)
        scaled_RO = u_RO * scale.to(p.device, dtype)
        return (scaled_RO.mT @ w_RI.to(dtype) / len(s_RL)).view_as(p).to(p.dtype)

    def _described(self) -> list[str]:
        shapes = [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in self._params.items()]
        owned = [f"owners of {n}: {o.int().tolist()}" for n, o in sorted(self._owners.items())]
        return [f"draws: {self._draws}", f"seed: {self._seed}", *shapes, *owned]


@dataclass(frozen=True)
class _Directions:
    """Directions for one parameter: the outer products of u (K, O) and w (K, I).

    Attributes:
        u_KO: Signs, one for every row of the parameter.
        w_KI: Signs, one for every column, with all dimensions behind the first as one.
    """

    u_KO: Tensor
    w_KI: Tensor

    @staticmethod
    def drawn(p: Tensor, count: int, *words: int) -> _Directions:
        rows = len(p) if p.dim() else 1
        columns = math.prod(p.shape[1:])
        return _Directions(
            signs((count, rows), p, *words, 0), signs((count, columns), p, *words, 1)
        )


class _Losses(nn.Module):
    """A function of a model and a batch as a module, so that its parameters can be exchanged."""

    def __init__(self, model: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self._function = model, function

    def forward(self, *batch: Any) -> Tensor:
        return self._function(self.model, *batch)


def _refuse_strange(owners: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    for name, owned in owners.items():
        if name not in params:
            raise ValueError(f"SeededGradients: owners names {name!r}, which is not trained")
        rows = len(params[name]) if params[name].dim() else 1
        if owned.dim() != 2 or owned.shape[1] != rows:
            raise ValueError(
                f"SeededGradients: owners of {name!r} have the shape {tuple(owned.shape)}; give "
                f"(losses, {rows})"
            )
        if not ((owned == 0) | (owned == 1)).all():
            raise ValueError(f"SeededGradients: owners of {name!r} must be 0 or 1")
