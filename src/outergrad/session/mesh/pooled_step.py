"""A backward whose gradients become the mean over the ranks of all sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outergrad.comm.torch import TorchComm
from outergrad.comm.words import words_of_all
from outergrad.core.errors import ExchangeError
from outergrad.core.model import Model
from outergrad.core.reasons import Reason
from outergrad.core.types import Factors, Slot
from outergrad.linalg.outer import stack
from outergrad.messages.header import Header
from outergrad.record.gauge import Reading
from outergrad.session.mesh.level_step import LevelStep, SharePlanner
from outergrad.session.mesh.pooling import Conclusion, Pooling, pool
from outergrad.session.mesh.rank_reports import Fate, Report, ShareOutcome
from outergrad.step import param_grad
from outergrad.step.captured import Captured
from outergrad.step.carried_over import CarriedOver
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep


class RankOfSite:
    """This rank among those of its site and among its counterparts at the others.

    Args:
        model: what is shared.
        shares: what each rank of a site takes to the other sites.
        planner: of this rank's share.
        local: to the ranks of this site.
        between: to this rank's counterparts.
    """

    def __init__(
        self,
        model: Model,
        shares: Sequence[Model],
        planner: SharePlanner,
        local: TorchComm,
        between: TorchComm,
    ) -> None:
        self.model, self.shares, self.planner = model, shares, planner
        self.local, self.between = local, between
        self._told: tuple[Reason, ...] = ()

    @property
    def share(self) -> Model:
        """This rank's."""
        return self.shares[self.local.rank]

    def told(self, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
        """How units travelled and why, if the other ranks have not been told that before."""
        return () if reasons == self._told else reasons

    def has_told(self, reasons: tuple[Reason, ...]) -> None:
        """They have been now."""
        self._told = reasons or self._told


class PooledStep(LevelStep):
    """Collects; at the end of backward pools inside the site, exchanges, and spreads the result.

    Every rank takes a share of the model to its counterparts at the other sites, so that these see
    one site with the rows, or the mean gradient, of all its ranks.

    Args:
        task: of the backward.
        site: where it runs.
        used: parameters that it leaves a gradient in.
        carried_over: rows of passes under `no_sync()`.
        header: what this rank has, as told inside the site.
        alone: whether no other session is on the same mesh.
        reading: measures the share, if the step is recorded.
    """

    def __init__(
        self,
        task: int,
        site: RankOfSite,
        used: set[str],
        carried_over: CarriedOver,
        header: Header,
        *,
        alone: bool,
        reading: Reading | None,
    ) -> None:
        super().__init__(task, site.model, used, header.step, site.planner)
        self._site, self._header, self._alone, self._reading = site, header, alone, reading
        self.captured = Captured(site.model, used, carried_over=carried_over)

    def _go_through(self, fate: Fate) -> None:
        rows: dict[Slot, Factors] = {}
        if fate == Fate.GOOD:
            try:
                self._refuse_sparse()
                rows = {slot: stack(parts) for slot, parts in self.captured.take().items()}
            except Exception as error:
                fate, self._error = Fate.FAILED, error
        reports = self._reports(fate)
        pooling = Pooling(self._site.model, self._site.shares, reports)
        fate = max(report.fate for report in reports)
        stacked = self._pooled(pooling, rows) if fate == Fate.GOOD else {}
        if self._site.share.params:
            fate = self._between(lambda: self._shared(pooling, stacked), fate)
        self._spread(self._outcome(fate))

    def _refuse_sparse(self) -> None:
        for name, p in self._site.model.params.items():
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(
                    f"{name!r} has a sparse gradient: build its layer with sparse=False"
                )

    def _reports(self, fate: Fate) -> list[Report]:
        """What every rank of the site says of its backward."""
        comm, ours = self._site.local, self._header
        found = self.captured.has_autograd_grad
        has_autograd_grad = tuple(name in found for name in self._site.model.params)
        told = words_of_all(comm, Report(ours, fate, has_autograd_grad).words())
        try:
            return [Report.parse(words, ours, rank) for rank, words in enumerate(told)]
        except ExchangeError as error:
            raise ExchangeError(f"among the ranks of one site, {error}") from error

    def _pooled(self, pooling: Pooling, rows: Mapping[Slot, Factors]) -> dict[Slot, list[Factors]]:
        """The rows of this rank's share; gradients that are formed go into `param.grad`."""
        captured = Captured(self._site.model, self.captured.used)
        for slot, factors in rows.items():
            captured.add(slot, lambda factors=factors: factors)
        for name in pooling.formed:
            captured.settle(name)
        means, stacked = pool(pooling, self._site.local, rows, self._site.model.params)
        param_grad.overwrite(self._site.share.params, means)
        return stacked

    def _outcome(self, fate: Fate) -> ShareOutcome:
        """What this rank has to say of its share."""
        step = self.shared
        if fate != Fate.GOOD or step is None or step.choice is None:
            return ShareOutcome(fate)
        used = tuple(name in step.context.used for name in self._site.share.params)
        return ShareOutcome(fate, used, step.choice.tap_next, self._site.told(step.choice.reasons))

    def _shared(self, pooling: Pooling, stacked: Mapping[Slot, list[Factors]]) -> SharedStep:
        site, share = self._site, self._site.share
        used = pooling.used & share.params.keys()
        masks = tuple(name in used for name in share.params)
        uses = tuple(pooling.use(slot) for slot in share.slots)
        own = (self._header.fingerprint, self._header.step, site.between.rank)
        spec = StepSpec(
            model=share,
            planner=site.planner,
            comm=site.between,
            header=Header(*own, masks, uses, self._alone),
            used=used,
            carried_over=CarriedOver(stacked),
            reading=self._reading,
        )
        return SharedStep(spec)

    def _spread(self, outcome: ShareOutcome) -> None:
        """Tells the others of the site, and hears of their shares."""
        site = self._site
        conclusion = Conclusion(site.shares, site.local, outcome)
        self._conclude(conclusion.fates)
        if self.applied:
            means, self.reasons = conclusion.gradients()
            self.used = set(means)
            self.tap_next = conclusion.tap_next()
            site.has_told(outcome.reasons)
            others = {n: g for n, g in means.items() if n not in site.share.params}
            param_grad.overwrite(site.model.params, others)
