"""Intra-site reducer for ranks that each have a whole model: every rank pools a share of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outergrad.buckets.bucket import copy_scaled
from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError, RefusedError
from outergrad.core.model import Model
from outergrad.core.payload import BYTES
from outergrad.core.transform import GradientTransform
from outergrad.core.transport import Comm
from outergrad.core.types import Unit
from outergrad.messages.header import Header, Join
from outergrad.messages.layout import Layout
from outergrad.messages.raw import as_tensor
from outergrad.messages.wire import Piece, State
from outergrad.session.mesh.mesh_step import ScatterResult
from outergrad.session.mesh.pooling import Pooling, SharePlanner, message_bytes, pool
from outergrad.session.mesh.rank_reports import (
    ENDING_WORDS,
    RankReport,
    RankStatus,
    Report,
    reasons_text,
    told_reasons,
)
from outergrad.step import param_grad
from outergrad.step.buffer_message import BufferMessage
from outergrad.step.buffers import SharedBuffers
from outergrad.step.captured import Captured, CarriedOver
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep

_MOST_TEXT = 1 << 24


@dataclass(frozen=True)
class _Ranks:
    """Context of the buffer message inside a site, before buffers go to the other sites."""

    headers: list[Header]
    comm: Comm
    state: State = State.GOOD


class Pooled:
    """Intra-site reducer in which every rank takes a share of the model to its counterparts.

    These see one site with the rows, or the mean gradient, of all its ranks.

    Args:
        model: what is shared.
        planner: of this rank's share.
        local: transport to the ranks of this site.
        transform: changes the site's gradient, at the rank whose share it is.

    Attributes:
        params: parameters of the model, by name.
        active: ranks of the site that have a batch in `session.join()`.
    """

    def __init__(
        self,
        model: Model,
        planner: SharePlanner,
        local: Comm,
        transform: GradientTransform | None = None,
    ) -> None:
        self._planner, self.local, self._transform = planner, local, transform
        self.params = model.params
        self.active: list[int] = []
        self._text, self._stays = b"", set[str]()
        self._told: list[list[int]] = []
        self._buffers = self._site_buffers = SharedBuffers()

    def prepare(self, captured: Captured) -> None:
        """Computes this rank's rows; raises for a sparse gradient."""
        for name, p in self.params.items():
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(
                    f"{name!r} has a sparse gradient: build its layer with sparse=False"
                )
        captured.compute()

    def reduce(
        self, spec: StepSpec, captured: Captured, fate: RankStatus
    ) -> tuple[StepSpec, RankStatus]:
        """Sends each rank what it pools, and receives rows and gradients of this rank's share."""
        reports = self._reports(spec.header, captured, fate)
        pooling, share = Pooling(spec.model, self._planner.shares, reports), self._planner.share
        worst, carried_over = max(report.fate for report in reports), CarriedOver()
        if worst == RankStatus.GOOD:
            for name in pooling.formed:
                captured.settle(name)
            means, stacked = pool(pooling, self.local, captured)
            param_grad.overwrite(share.params, means)
            carried_over = CarriedOver(stacked)
            spec = replace(spec, buffers=self._pooled_buffers(spec.buffers, reports))
        self.active = pooling.active
        between = self._planner.between
        self._stays = pooling.used & (share.params.keys() - between.params.keys())
        header = pooling.header(spec.header, between)
        own = replace(
            spec,
            model=between,
            header=header,
            transform=None if header.join == Join.OUT else self._transform,
            used=pooling.used & between.params.keys(),
            carried_over=carried_over,
        )
        return own, worst

    def _reports(self, header: Header, captured: Captured, fate: RankStatus) -> list[Report]:
        """Exchanges the reports of all ranks of the site on their backward passes."""
        comm, found = self.local, captured.has_autograd_grad
        ours = replace(header, rank=comm.rank)
        words = Report(ours, fate, tuple(name in found for name in self.params)).words()
        told = enumerate(words_of_all(comm, words))
        try:
            return [Report.parse(theirs, ours, rank) for rank, theirs in told]
        except ExchangeError as error:
            told = f"among the ranks of one site, {error}"
            raise ExchangeError(told, kind=error.kind) from error

    def _pooled_buffers(self, buffers: SharedBuffers, reports: list[Report]) -> SharedBuffers:
        """Pools buffers inside the site; they stay apart from the model until the step counts."""
        ranks = _Ranks([report.header for report in reports], self.local)
        message = BufferMessage(buffers, ranks, reports[0].header.step)
        message.start()
        try:
            message.receive()
        except RefusedError as error:
            told = f"among the ranks of one site, from rank {error.site}: {error}"
            raise ExchangeError(told) from error
        self._buffers, self._site_buffers = buffers, buffers.pooled(message.values())
        return self._site_buffers

    def tell(self, ending: RankReport, step: SharedStep | None) -> list[list[int]]:
        """Exchanges the reports on all shares, with used parameters, taps and a text's length."""
        planner, share = self._planner, self._planner.share
        used, tap_next = [False] * len(share.params), (False,) * len(share.units)
        if ending.fate == RankStatus.GOOD and step is not None and step.choice is not None:
            choice, found = step.choice, step.context.used | self._stays
            used, tap_next = [name in found for name in share.params], choice.tap_next
            news = dict(zip(share.units, choice.reasons, strict=True))
            if not news.items() <= planner.known.items():
                self._text = reasons_text(choice.reasons)
        words = [*ending.words(), len(self._text), *map(int, (*used, *tap_next))]
        sizes = [ENDING_WORDS + 1 + len(s.params) + len(s.units) for s in planner.shares]
        arrived = self.local.all_gather(self.local.control(words), sizes).wait()
        said = [part.tolist() for part in arrived]
        self._told = [words[ENDING_WORDS:] for words in said]
        return [words[:ENDING_WORDS] for words in said]

    def spread(self, step: SharedStep) -> ScatterResult:
        """Sends this share's mean gradients to all ranks, and writes those of the other shares."""
        shares, known, used = self._planner.shares, self._planner.known, set[str]()
        tap_next: dict[Unit, bool] = {}
        layouts = [self._layout(rank) for rank in range(len(shares))]
        own, arrived = self._planner.share, self._gathered(layouts)
        for rank, (share, layout, part) in enumerate(zip(shares, layouts, arrived, strict=True)):
            means = layout.by_name(layout.flats(part))
            used |= means.keys()
            if share is not own:
                param_grad.overwrite(share.params, means)
            flags = self._told[rank][1 + len(share.params) :]
            tap_next.update(zip(share.units, map(bool, flags), strict=True))
            (text,) = layout.gradients(part)
            if isinstance(text, Tensor):
                told = told_reasons(text.cpu().numpy().tobytes(), rank, len(share.units))
                known.update(zip(share.units, told, strict=True))
        self._buffers.take_pooled(self._site_buffers)
        return ScatterResult(frozenset(used), tap_next, known)

    def _gathered(self, layouts: list[Layout]) -> list[Tensor]:
        comm, own = self.local, layouts[self.local.rank]
        message = torch.zeros(message_bytes(own), dtype=torch.uint8, device=comm.device)
        for name, view in own.by_name(own.flats(message)).items():
            copy_scaled(name, own.extras[name], view, 1.0)
        for view in own.views(message):
            if view is not None:
                view.fill([as_tensor(self._text)])
        return comm.all_gather(message, [message_bytes(layout) for layout in layouts]).wait()

    def _layout(self, rank: int) -> Layout:
        """Layout of the message of a rank's share: gradients of its used parameters, and text."""
        share, (length, *flags) = self._planner.shares[rank], self._told[rank]
        if not 0 <= length < _MOST_TEXT:
            raise ExchangeError(f"local rank {rank} announced {length} bytes of words")
        pairs = zip(share.params.items(), flags[: len(share.params)], strict=True)
        words = Piece(None, length, torch.uint8, None, form=BYTES)
        return Layout(0, {name: p for (name, p), used in pairs if used}, [words])
