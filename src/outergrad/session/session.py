"""Session: the public methods of a distributed model, from `distribute` to `detach`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from outergrad.capture.backward_listeners import ignore_backwards, listen_to_backwards
from outergrad.capture.batch import AnySamples
from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import HeldHooks
from outergrad.capture.engine import NO_TASK, current_task
from outergrad.capture.kept import Alarm
from outergrad.capture.optimizer_steps import LoopWatch, SeenOptimizers, look_at_steps, look_away
from outergrad.capture.tapped_layer import TappedLayer
from outergrad.commit.participant import is_in_trouble
from outergrad.core.errors import (
    BoardGoneError,
    DriftError,
    ExchangeError,
    Failure,
    SiteLostError,
    SitesChangedError,
)
from outergrad.core.protocols import Method
from outergrad.core.transform import accumulating
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.events import Evaluation
from outergrad.record.coverage import Coverage, coverage, trials_noted
from outergrad.record.evaluation import evaluation
from outergrad.record.readable import Layer, layers_of, read_noted
from outergrad.record.stats import Stats
from outergrad.replay.block_tap import TappedBlock
from outergrad.session.after_step import Aftermath, HookRunner
from outergrad.session.choosing import choosing_of
from outergrad.session.core import Core
from outergrad.session.elastic import Elastic
from outergrad.session.exchange import Exchange
from outergrad.session.failure import FailureHandler
from outergrad.session.farewell import end_session
from outergrad.session.final_barrier import FinalBarrier
from outergrad.session.handover import Handover
from outergrad.session.inspect import Inspection
from outergrad.session.loaded_weights import LoadedWeights
from outergrad.session.loop import BackwardLoop
from outergrad.session.membership import Membership
from outergrad.session.ranks import OneRank
from outergrad.session.replica_check import ReplicaCheck
from outergrad.session.reporting import Reporter, described
from outergrad.session.running_step import RunningStep
from outergrad.session.settings import Settings
from outergrad.session.state import Progress, resumed, saved
from outergrad.session.transform_checks import changes, noted, refuse_join, units_shown
from outergrad.session.uneven_loops import UnevenLoops
from outergrad.session.updates import SharedGradients
from outergrad.session.usual_method import usual_noted
from outergrad.step.joint import Point
from outergrad.step.mishaps import Mishaps
from outergrad.step.tentative import Tentative
from outergrad.step.transport_state import end_unfinished, lost_sites_told

if TYPE_CHECKING:
    from outergrad.private.spent import PrivacySpent

_LOG = logging.getLogger("outergrad")


class Session:
    """Session of a distributed model, from `distribute`: shares gradients while it is attached.

    Args:
        inspection: of the model.
        comm: transport to the other sites.
        fingerprint: what the sites have agreed on.
        settings: the user's.
        ranks: how the ranks of this site come together; None for a site of one rank.
        updates: what the sites share; None for the gradients of every backward.
    """

    def __init__(
        self,
        inspection: Inspection,
        comm: Comm,
        fingerprint: int,
        settings: Settings,
        ranks: OneRank | None = None,
        updates: SharedGradients | None = None,
    ) -> None:
        self._updates = updates = SharedGradients() if updates is None else updates
        self._ranks = ranks = OneRank(comm) if ranks is None else ranks
        self._not_auto = settings.not_auto
        self._layers: Mapping[str, Layer] = {}
        self._at = at = Membership(comm, fingerprint)
        model, compressors = inspection.model, inspection.compressors
        about = (settings.method, model, compressors, self._passes_of)
        sites, told = (ranks.number, ranks.count), described(settings, comm)
        reporter = Reporter(settings.recorders, *sites, *about, told, self.coverage)
        self._reporter = reporter
        ranks.report(reporter)
        mishaps = Mishaps(
            model.params,
            ranks.number,
            lambda: at.comm.sites,
            settings.max_bad_steps,
            reporter.mishap,
        )
        told = (settings, ranks, reporter, mishaps, self._on_joint)
        self._exchange = exchange = Exchange(inspection, at, *told)
        reporter.count_by(exchange.counter)
        self._tentative = Tentative(model.params, compressors, lambda: at.me)
        self._loaded = LoadedWeights(exchange, at, settings.method)
        parts = (ranks, reporter, mishaps, self._tentative, self._loaded)
        self._core = core = Core(at, exchange, RunningStep(), *parts)
        self._choosing = choosing_of(compressors, model, comm, fingerprint)
        self._failure = failure = FailureHandler(core)
        self._barrier = barrier = FinalBarrier(core, failure)
        seen, watch = SeenOptimizers(exchange.names), LoopWatch(exchange.names, self._steps)
        self._elastic = Elastic(self, core, failure, barrier, seen, settings.lines)
        remedy = ranks.remedy or updates.remedies[settings.on_drift]
        drift = (settings.verify_every, settings.on_drift, remedy)
        self._check = ReplicaCheck(core, failure, barrier, seen, *drift)
        self._loop = BackwardLoop(
            self,
            core,
            failure,
            self._elastic,
            Aftermath(core, failure, self._choosing, settings.tap),
            (HookRunner(core, self._hooks, watch.passing_over).run, self._check.follow),
            updates.next_share,
            self._forget_gradients,
            updates.settle_first,
            follows_nodes=updates.follows_nodes,
        )
        norms = inspection.norms_over_sites
        self._uneven = UnevenLoops(core, failure, self._loop, watch, norms)
        ranks.attach(self._loop)
        updates.attach(core, failure, self._elastic, self._loop)
        at.group.attached.add(self)
        at.note_end(counted=False)

    def tap(self, inspection: Inspection) -> None:
        """Swaps the classes of layers and blocks, so that they report their products."""
        alarm, exchange, loop = Alarm(), self._exchange, self._loop
        groups = self._reporter.groups
        if exchange.batch is not None:
            exchange.batch.label_by(groups)
        for layer in inspection.layers:
            watched = [[loop.watched[name] for name in slot.params] for slot in layer.slots]
            batch = exchange.batch or (AnySamples(groups) if self._reporter.by_sample else None)
            tapped = TappedLayer(layer.module, layer.rule, layer.slots, watched, loop, batch, alarm)
            exchange.next_forward.add(tapped)
            exchange.header_builder.add(tapped)
        for found in inspection.blocks:  # in the order of the model
            watched = [[loop.watched[name] for name in params] for params in found.params_of]
            exchange.blocks.add(TappedBlock(found, watched, loop, alarm))

    def watch(self, model: nn.Module, watch: ModelWatch) -> None:
        """Begins to look for changes of the model."""
        self._layers = layers_of(model)
        self._updates.watch(model)
        self._ranks.watch(self._loop, model, watch)
        look_at_steps(self._loop)
        if self._ranks.watches_backwards:
            self._loaded.watch(model)
        if self._ranks.watches_backwards and self._exchange.several:
            listen_to_backwards(self._loop)
        if self._ranks.watches_backwards and self._exchange.batch is not None:
            self._exchange.batch.watch(model)
        if self._exchange.drift is not None:
            self._exchange.drift.watch(dict(model.named_parameters()))
        if self._ranks.watches_backwards and self._reporter.groups is not None:
            self._reporter.groups.watch(model)

    def take(self, found: Handover) -> None:
        """Takes the state of training from the sites that were there before."""
        self._elastic.take(found)

    def move(self, comm: Comm) -> None:
        """Continues on another transport, because the sites have changed."""
        self._elastic.move(comm)
        self._check.move()

    @property
    def shared(self) -> Mapping[str, nn.Parameter]:
        """Shared parameters by name; with `og.LocalSteps` the weights of the last exchange."""
        return self._exchange.model.params

    def transport(self) -> Comm:
        """Returns the transport, after a move if the sites have changed.

        Raises:
            SiteLostError: the transport must not be used any more.
        """
        self._elastic.require_group()
        return self._at.comm

    def _steps(self) -> int:
        return self._at.stats.step

    def _passes_of(self, name: str) -> int:
        return self._exchange.cadence.passes_of(name)

    def _on_joint(self, point: Point, delta: Tensor) -> Tensor:
        return self._loop.on_joint(point, delta)

    def _hooks(self) -> Mapping[str, HeldHooks]:
        return self._ranks.hooks(self._loop.watched)

    def _forget_gradients(self) -> None:
        """Drops gradients that were not shared, as the loops of the others do."""
        self._updates.forget_gradients()
        self._uneven.zero_grad()

    # -- what users call ------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients of backward passes inside it in `param.grad`, unshared.

        The first backward outside shares all that has been accumulated, as with DDP. It travels as
        factors if the method would still send all their rows as factors, and if nothing else wrote
        to `param.grad` since it was None. With `og.LocalSteps` it is about the ranks of this site.

        Raises:
            RuntimeError: a transform needs the gradient of each sample, and does not add up several
                passes.
        """
        exchange = self._exchange
        if exchange.batch is not None and accumulating(exchange.transform) is None:
            raise RuntimeError(
                f"session.no_sync(): {exchange.transform!r} needs the gradient of each "
                f"sample, which is not kept over several passes: share every backward, of one batch"
            )
        with self._updates.no_sync(self._loop.unsynchronised()):
            yield

    def join(
        self,
        *,
        step: Callable[[], Any] | None = None,
        divide_by_initial_world_size: bool = False,
    ) -> AbstractContextManager[None]:
        """Lets the sites run the loop inside it over unequal numbers of batches.

        A site whose loop is over takes part in the others' steps with a weight of 0, until all
        have run out: the mean gradient is over the sites that have a batch. Every site must enter
        it and run nothing but the steps of this model inside. At the end all replicas are equal,
        with the states of their optimizers.

        A loop that steps several models, each distributed over a process group of its own, goes
        inside the joins of all: `with s1.join(), s2.join():`.

        Args:
            step: what the loop does after each backward; called after each step of the others:
                `optimizer.step`, or more, for a scaler or a schedule. By default the optimizers
                that the loop was seen to step.
            divide_by_initial_world_size: whether sums are divided by the number of all sites, also
                of those that have run out, as DDP's `join` does by default: late batches then
                count as much as all others, and gradients become smaller at the end. The same on
                every site; only with `weighting="sites"`.

        Raises:
            RuntimeError: this session or its model cannot be joined, as with `og.LocalSteps`; or
                the sites lost each other.
            StepDiscardedError: the loop of another site raised.
        """
        self._updates.refuse_join()
        refuse_join(self._exchange.transform)
        if not self._exchange.several:
            return nullcontext()
        return self._uneven.join(step, divides_by_all=divide_by_initial_world_size)

    def make_equal(self, *optimizers: Optimizer) -> bool:
        """Makes every replica equal to site 0's: shared parameters, buffers, optimizer states.

        Gradients that the last step shared become equal, too, if they have not been applied. Call
        it on every site at the same point of the program, not during backward. What is a site's
        own (`og.Local`) stays as it is. Takes one exchange of 40 bytes if nothing differs.

        Args:
            *optimizers: optimizers whose states are to be equal, too; with `verify_every` those
                that were seen to step are known.

        Returns:
            True if two sites differed.

        Raises:
            RuntimeError: during backward, or the session is detached, or cannot do it, as with
                `og.LocalSteps`.
            SiteLostError: another site does not arrive, or is gone.
        """
        self._refuse_make_equal()
        self._check.refuse_other(optimizers)
        if not self._exchange.several:
            return False
        self._elastic.require_group()
        return self._check.make_equal(optimizers)

    def _refuse_make_equal(self) -> None:
        self._ranks.refuse_make_equal()
        self._updates.refuse_make_equal()
        if not self._at.attached or current_task() != NO_TASK:
            raise RuntimeError(
                "session.make_equal(): call it on an attached session, and not during backward"
            )

    def flush(self, *, whole: bool = False) -> None:
        """Shares what the last steps of `og.LocalSteps` have changed: at the end of training.

        Call it on every site, after the same number of steps. Then all have the same weights. With
        methods that share gradients nothing is left to share, and it only checks that all sites
        have applied the same in the last step.

        Args:
            whole: With `og.LocalSteps`, True to share all that the method has not sent, too: the
                weights are then the mean of all that the sites have learned. It takes the bytes of
                one step of DDP. Choose it at the end of a training with `error_reset`. Alike on all
                sites.

        Raises:
            SiteLostError: another site is lost.
            DriftError: sites have applied different things in the last step.
            RuntimeError: with `og.LocalSteps`, the weights have changed and no step was counted.
            ValueError: `whole` is True, and the method has a quorum.
        """
        if self._at.attached:
            self._updates.flush(whole=whole)
            self._elastic.require_group()
            self._barrier.settle()

    def average(self, rounds: int | None = None) -> None:
        """Makes the weights of all sites their mean, with `og.Gossip`: at the end of training.

        Call it on every site, after the same number of steps. Buffers, as running statistics of
        norms, stay each site's own. Training may go on afterwards.

        Args:
            rounds: None for the mean of all sites, by one all-reduce, equal to the bit. A number n
                for so many uncompressed exchanges with neighbours, which bring sites near to the
                mean: choose it where a site is gone, and no exchange of all is possible.

        Raises:
            SiteLostError: without `rounds`, a site is gone.
            RuntimeError: likewise, a neighbour does not answer; or the method is not `og.Gossip`.
            ValueError: `rounds` is no whole number, 1 or more.
        """
        if self._at.attached:
            self._updates.average(rounds)

    def stepped(self) -> bool:
        """Counts, with `og.LocalSteps`, a step that no `torch.optim` optimizer of the model made.

        For updates written by hand, optimizers that are no `torch.optim.Optimizer`, and weights
        that are copied from others: float32 masters, one flat tensor. Call it on every site after
        each such update, or in place of a step that this site skips. Do not call it beside a step
        of a `torch.optim` optimizer, which is counted by itself. With methods that share gradients
        it does nothing.

        Returns:
            True if an exchange has just changed the weights. Where they are copies, copy them back
            to their masters then, and after `flush()`; else the next update undoes the exchange.
        """
        return self._at.attached and self._updates.stepped()

    def samples(self, n: int) -> None:
        """Sets the number of samples of the next backward, with `weighting="samples"`.

        For a loss that is a mean over something else than the first dimension of the model's
        input: tokens, positions that are not masked. Call it on every site before each backward;
        numbers for several backward passes in `no_sync` add up.

        Args:
            n: number of samples on this site.

        Raises:
            RuntimeError: the model was distributed with another weighting.
            ValueError: `n` is no whole number, 0 or more.
        """
        self._exchange.weighting.say(n)

    def units(self, ids: Iterable[Any]) -> None:
        """Says which samples of the next batch are of one unit of privacy, as a patient.

        Call it before each forward of the model that is trained on, with `og.Private(unit=...)`:
        what samples of one id add to the gradient is clipped as a whole. Each list of ids is for
        one forward; those without gradients, as of an evaluation, take none.

        Args:
            ids: whole numbers or texts, one for each sample, in their order: a list, or a tensor
                of one dimension. They stay at this site.

        Raises:
            RuntimeError: the session's transform does not ask for units.
            TypeError: something is no such id.
            ValueError: raised by the forward, if it has another number of samples.
        """
        if self._exchange.units is None:
            raise RuntimeError(
                "session.units(ids) needs og.distribute(..., transform=og.Private(unit='patient'))"
            )
        self._exchange.units.say(ids)

    def groups(self, labels: Iterable[Any]) -> None:
        """Says which group each sample of the next batch is of: a class, a speaker, a machine.

        Call it before each forward of the model that is trained on, for recorders with
        `groups=True`: they record the singular values of what each group adds to the gradient of
        each layer. Each list of labels is for one forward. A site that gives none is one group.
        Labels stay at this site, in the files of its recorders.

        Args:
            labels: whole numbers or texts, one for each sample, in their order: a list, or a tensor
                of one dimension.

        Raises:
            RuntimeError: no recorder of the session asks for groups, or forwards are not watched.
            TypeError: something is no such label.
            ValueError: raised by the forward, if it has another number of samples.
        """
        groups = self._reporter.groups
        if groups is None or not groups.can_be_taken:
            raise RuntimeError(
                "session.groups(labels) needs og.distribute(..., recorder=og.JSONL(folder, "
                "groups=True)), or another recorder with groups=True, and a site of one rank"
            )
        groups.say(labels)

    def coverage(self) -> Coverage:
        """Returns how each parameter travels and why; `print(session.coverage())` shows a table."""
        exchange = self._exchange
        model, compressors = exchange.model, exchange.compressors
        params = {**model.params, **exchange.frozen, **exchange.local}
        units, reasons = units_shown(model, compressors)
        sites, chosen = self._at.comm.world_size, [exchange.chosen.get(u) for u in units]
        told = (units, reasons, [compressors[unit] for unit in units], sites, chosen)
        seen = (exchange.header_builder.rows, exchange.header_builder.untappable)
        lines = exchange.cadence.noted(coverage(params, exchange.local, *told, *seen))
        if self._choosing is not None:
            lines = trials_noted(lines, model.units, self._choosing.chooser)
        lines = usual_noted(noted(lines, exchange.transform), self._not_auto)
        lines = self._updates.explained(self._ranks.explained(lines))
        return read_noted(lines, self._layers, **changes(exchange.transform))

    def choice(self) -> dict[str, Method]:
        """Returns the method that `og.Auto()` has chosen so far per parameter, by its full name.

        `og.Auto(frozen=session.choice())` uses it from the first step on, without trials.

        Raises:
            RuntimeError: the methods of this session are not chosen by the time of steps.
        """
        exchange = self._exchange
        chooser = exchange.compressors.chooser
        if chooser is None:
            raise RuntimeError("session.choice(): pass og.Auto(...) to og.distribute()")
        units = exchange.model.units
        of_units = {n: chooser.method_of(unit) for unit in units for n in unit.params}
        names = [*exchange.model.params, *exchange.frozen]
        return {name: of_units.get(name, chooser.method_of(None)) for name in names}

    def stats(self) -> Stats:
        """Returns bytes and seconds of the last synchronised step, per layer and in total."""
        counter, drift = self._exchange.counter, self._exchange.drift
        stats = self._at.stats if counter is None else self._at.stats.counted(counter.steps)
        return stats if drift is None else stats.drifting(drift.exchanges, drift.drifted)

    def privacy(self) -> PrivacySpent:
        """Returns what this session has released so far; `print(session.privacy())` shows a table.

        Nothing is sent. By privacy loss distributions it takes a second per observer; call it at
        the end, or now and then.

        Returns:
            ε by observer, δ, the number of released steps, and what is not covered.

        Raises:
            RuntimeError: nothing is counted, as the session has no `og.Private` with a ledger.
            ValueError: the ledger's accountant has no bound for such steps.
        """
        exchange = self._exchange
        if exchange.counter is None:
            raise RuntimeError(
                f"session.privacy(): nothing is counted with transform={exchange.transform!r}: "
                f"pass og.Private(..., ledger=og.private.Ledger(delta), sampling=loader)"
            )
        return exchange.counter.spent(tuple(exchange.local))

    def observe(self, values: Any) -> None:
        """Gives `og.OnDrift(..., of="observed")` what its detector listens to at this site.

        Call it in every step, before the optimizer's, and with a method of gradients before
        backward: with the largest probability of each row, a loss, a mean of a layer. Nothing of
        it is sent but a byte at each check, which says whether the detector sees drift.

        Args:
            values: finite numbers, in their order: one, or a tensor, array or list of them.

        Raises:
            RuntimeError: the session does not listen to what is observed.
            TypeError: the values are no numbers.
        """
        if self._exchange.drift is None:
            raise RuntimeError(
                "session.observe(): no exchange waits for a drift of data: pass "
                "og.OnDrift(..., of='observed') as k of og.LocalSteps, or as every= of a method"
            )
        self._exchange.drift.observe(values)

    def log(self, **values: float) -> None:
        """Sends values of the training loop to the recorders, as `log(loss=loss.item())`.

        Each site logs its own values, not thinned by `every`. Without a recorder it does nothing.

        Args:
            **values: numbers by name, or tensors of one element.

        Raises:
            TypeError: a value is no number.
        """
        self._reporter.log(self._at.stats.step, values)

    def log_eval(
        self,
        y: Any = None,
        p: Any = None,
        *,
        alone: Any = None,
        metrics: Mapping[str, Any] | None = None,
        classes: Sequence[str] | None = None,
    ) -> Evaluation:
        """Evaluates the model on rows that this site has held out, and tells the recorders.

        Call it at the end of an epoch, or of training; `outergrad report` shows the figures of each
        site. Nothing is sent: it is not a step, and sites need not call it alike. What is recorded
        are figures of all rows together: their number, the share of each class, accuracy and AUC
        with intervals at 95%, and how predicted probabilities and observed shares agree.

        Args:
            y: labels, whole numbers from 0 on, (N,). Any tensor, array or list.
            p: what the model predicts, one row per label: of two classes (N,), the probability of
                the class 1, or else (N, C). Scores that are no probabilities, as logits, do as
                well: those of two classes are above 0 where class 1 is predicted. They have no
                calibration.
            alone: like `p`, what a model predicts that this site has trained alone, for the same
                rows. Then the gain over training alone is recorded as well.
            metrics: further figures by name, as `MetricCollection.compute()` of torchmetrics
                returns them. May be given without `y` and `p`.
            classes: names of the classes; by default their numbers.

        Returns:
            What was recorded, or would be if there were a recorder; `print` shows it in a line.

        Raises:
            ValueError: the arguments are not of the same rows and classes, or not finite.
            TypeError: a metric is no number, or neither predictions nor metrics are given.
        """
        return self._reporter.log_eval(
            self._at.stats.step, evaluation(y, p, alone, metrics, classes)
        )

    def state_dict(self) -> StateDict:
        """Returns the session's state, to be saved beside the model and the optimizer.

        Every site saves its own, after the same step: no other site knows what it has not sent
        yet, nor its `og.Local()` parameters, listed under "local". With such parameters each site
        saves its own model, too. The state has plain tensors, numbers, strings, lists and dicts:
        `torch.load(weights_only=True)` reads it. A step whose backward raised is first ended with
        the other sites.

        With `og.LocalSteps` it has the weights of the last exchange and the outer optimizer, too,
        and may be saved between two exchanges, beside each site's own model and optimizer. An
        exchange under way is waited for, and applied when it would have been, as with
        `og.Gossip(overlap=...)`. With `quorum=` it waits until all sites save, and late ones have
        taken over what the others exchanged.

        Raises:
            RuntimeError: this site lost the others in the middle of a step.
            DriftError: sites have applied different things in the last step.
        """
        self._elastic.require_group()
        self._updates.level()
        self._barrier.settle()
        if current_task() == NO_TASK:
            self._tentative.begin()
        exchange, tap_next = self._exchange, self._exchange.next_forward.tap_next
        step, has_grad = self._at.stats.step, exchange.planner.has_autograd_grad
        progress = Progress(step, tap_next, has_grad)
        state = saved(exchange.owner, progress, exchange.compressors.states())
        more = {"cadence": exchange.cadence.state(), "samples": exchange.weighting.state()}
        if exchange.drift is not None:
            more["drift"] = exchange.drift.state()
        return {**state, **more, **self._ranks.state(), **self._updates.state()}

    def load_state_dict(self, state: StateDict | Sequence[StateDict]) -> None:
        """Goes on from saved states. Call it on every site: they check the states together.

        With the same number of sites training goes on to the bit as without an interruption. With
        another number, what the sites have not sent yet is divided among them, so that nothing is
        lost. Load the model after `distribute`, which makes its buffers equal to rank 0's.

        With `og.LocalSteps` each site's current weights are not in the states: load these with the
        model. With fewer sites than before, what the missing ones have changed since the last
        exchange is lost: for another number of sites save after `flush()`.

        Args:
            state: what this site's `state_dict()` returned, or a list of what it returned on all
                sites, in the order of their ranks, needed if the number of sites has changed.

        Raises:
            ValueError: on all sites, and nothing is changed: a state is of another version,
                method, model, site or number of sites, or the states are of different steps.
            RuntimeError: the session is detached, or lost the other sites, or is in backward.
        """
        exchange, at = self._exchange, self._at
        if not at.attached or current_task() != NO_TASK:
            raise RuntimeError("load a state into an attached session, and not during backward")
        self._elastic.require_group()
        self._ranks.refuse_state(state, exchange.owner)
        with lost_sites_told(at.comm, "load_state_dict on all sites", at.stats.step):
            progress, inheritances = resumed(state, exchange.owner, at.comm)
        exchange.compressors.load(inheritances)
        self._tentative.forget()
        exchange.remember_debts()
        exchange.planner.resume(progress.has_autograd_grad)
        exchange.cadence.load(state, at.comm.rank, at.comm.world_size)
        own = state if isinstance(state, dict) else state[at.comm.rank % len(state)]
        exchange.weighting.load(own.get("samples", {}))
        if exchange.drift is not None:
            exchange.drift.load(own["drift"], is_own=own["rank"] == at.comm.rank)
        exchange.next_forward.resume(progress.tap_next)
        at.resume(progress.step)
        if exchange.counter is not None:
            exchange.counter.restart()
        if self._choosing is not None:
            self._choosing.restart()
        self._reporter.resumed()
        self._loaded.resumed()
        self._updates.load(own)

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the parameters and buffers that each site keeps to itself (`og.Local`)."""
        return self._exchange.local_buffers.union(self._exchange.local)

    @property
    def has_own_weights(self) -> bool:
        """True if each site has weights of its own between two exchanges, by `og.LocalSteps`."""
        return self._updates.are_own

    # -- the end --------------------------------------------------------------------------------

    def detach(self) -> None:
        """Ends the session: the model is plain again and keeps its parameters and gradients.

        Call it on every site. A step whose backward raised is first ended with the other sites.
        Warns if another site is lost before the sites have compared their last steps. With
        `og.LocalSteps` each site keeps the weights that it has: call `flush()` before to make them
        equal. An exchange under way is waited for, and not applied; with `og.Gossip(overlap=...)`
        it is, as at the neighbours.

        Raises:
            DriftError: sites have applied different things in the last step.
        """
        if not self._at.attached:
            return
        try:
            self._updates.detach()
        finally:
            self._detach()
        self._updates.end()

    def _detach(self) -> None:
        at = self._at
        at.detach()
        self._ranks.detach()
        self._check.detach()
        at.group.attached.discard(self)
        end_unfinished(at.comm.key)
        told = self._barrier.settle_at_end()
        if self._choosing is not None and at.group.lost is None:
            self._choosing.restart()
        self._leave_model()
        end_session(at.comm)
        self._end_watching()
        self._reporter.close()
        if isinstance(told, DriftError):
            raise told
        if told is not None:
            warnings.warn(told, stacklevel=2)

    def _leave_model(self) -> None:
        """Makes the model plain again, on this site."""
        exchange = self._exchange
        look_away(self._loop)
        ignore_backwards(self._loop)
        if exchange.batch is not None:
            exchange.batch.remove()
        if exchange.drift is not None:
            exchange.drift.detach()
        if self._reporter.groups is not None:
            self._reporter.groups.remove()
        self._loaded.remove()
        self._loop.guard.forget()
        exchange.weighting.remove()
        for layer in [*exchange.next_forward.layers, *exchange.blocks]:
            layer.restore()
        for watched in self._loop.watched.values():
            watched.remove()
        if exchange.joint is not None:
            exchange.joint.remove()
        exchange.accumulator.clear()

    def release(self) -> None:
        """Ends the session on this site without a message, whenever the other sites end theirs.

        The model is plain again. Call `detach()` where all sites end together: that compares the
        last steps. Here the farewell says how many steps this site has made, and the digests of
        the last ones, by which the others compare.
        """
        if not self._at.attached:
            return
        self._updates.release()
        self._give_up("a session was")
        self._ranks.detach()
        self._check.detach()
        self._at.group.attached.discard(self)
        self._leave_model()
        end_session(self._at.comm)

    def settle_at_exit(self) -> None:
        """Compares the last steps when Python ends."""
        self._barrier.settle_at_exit()

    def __del__(self) -> None:
        """Ends a session that was collected together with its model, without `detach`.

        No message is sent, as the other sites may collect theirs at another time, or never.
        """
        at = getattr(self, "_at", None)
        if at is not None and at.attached and not sys.is_finalizing():  # it has settled at exit
            self._give_up("a session and its model were")

    def _give_up(self, what: str) -> None:
        """Ends the session without a message; a log line says what this site has not compared."""
        at = self._at
        at.detach()
        self._reporter.close()
        votes = self._exchange.votes
        if self._exchange.several and at.group.lost is None and not votes.are_over:
            _LOG.warning(
                "%s: %s given up without session.detach(): this "
                "site has not compared what the sites received in %s",
                at.me.called,
                what,
                votes.about,
            )

    def _end_watching(self) -> None:
        """Ends the watcher after the last session; joins an abort of the others if there is one."""
        group, board = self._at.group, self._at.comm.board
        if not group.attached:
            group.end_watching()
        if board is None or group.lost is not None or group.participant.made == 0:
            return
        # Sites that abort after this find the farewell instead.
        with suppress(BoardGoneError, SiteLostError, SitesChangedError):
            if is_in_trouble(board):
                raise self._failure.lost_by(ExchangeError("others gave up", kind=Failure.CLOSED))
