"""A site of one rank; `session/mesh/site_ranks.py` has sites of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import HeldHooks
from outergrad.capture.parameters import WatchedParameter
from outergrad.comm.words import words_of_all
from outergrad.commit.lost import named
from outergrad.core.transport import Comm
from outergrad.core.types import StateDict
from outergrad.planning.plan import Planner
from outergrad.record.coverage import Coverage
from outergrad.session.drift import LANE, Drift, compared
from outergrad.session.inspect import Inspection
from outergrad.session.made_equal import ReplicaState
from outergrad.session.model_guard import ModelGuard
from outergrad.session.reporting import Reporter
from outergrad.session.running_step import SyncedStep
from outergrad.session.state import Owner
from outergrad.step.spec import StepSpec
from outergrad.step.step import SharedStep

if TYPE_CHECKING:
    from outergrad.session.loop import BackwardLoop


class OneRank:
    """A site of one rank; what sites of several ranks do in its place, `session/mesh` says.

    Args:
        comm: transport to the other sites.
        number: the rank that reports and errors name; the site's by default.
        count: the number of ranks on all sites; that of the sites by default.
        always: True if gradients are shared even if there is one rank in all.

    Attributes:
        number: the rank that reports and errors name.
        count: the number of ranks on all sites.
        several: True if there is another rank to share with.
        watches_backwards: True if autograd's calls of the model are looked at.
        remedy: what a user can do where replicas differ, if they cannot be made equal; else "".
    """

    watches_backwards, remedy = True, ""

    def __init__(
        self,
        comm: Comm,
        number: int | None = None,
        count: int | None = None,
        *,
        always: bool = False,
    ) -> None:
        self._comm = comm
        self.number = comm.rank if number is None else number
        self.count = comm.world_size if count is None else count
        self.several = self.count > 1 or always

    def report(self, reporter: Reporter) -> None:
        """Begins to report for this site."""
        reporter.take_part(self._comm)

    def attach(self, loop: BackwardLoop) -> None:
        """Attaches this rank's own hooks, which report to the loop."""

    def guard(self, watched: Mapping[str, WatchedParameter], *, follows_nodes: bool) -> ModelGuard:
        """Returns what finds changes of the model."""
        return ModelGuard(watched, follows_nodes=follows_nodes)

    def watch(self, loop: BackwardLoop, model: nn.Module, watch: ModelWatch) -> None:
        """Begins to look for changes of the model."""
        loop.guard.watch(model, watch, loop.on_call)

    # -- steps ----------------------------------------------------------------------------------

    def planner(self, inspection: Inspection, whole: Planner) -> Planner:
        """Returns the planner of what this rank sends, given that of the whole model."""
        return whole

    def step(self, spec: StepSpec, unshared: Set[str]) -> SyncedStep:
        """Begins a step with the other sites.

        Args:
            spec: what the step is about.
            unshared: parameters whose gradients of earlier backward passes were not shared.
        """
        return SharedStep(spec)

    def begin(self) -> None:
        """Prepares for a backward pass that begins."""

    def note(self, step: SyncedStep) -> None:
        """Notes a shared step that is over."""

    def unsent(
        self, own: Mapping[str, Tensor], params: Mapping[str, nn.Parameter]
    ) -> Mapping[str, Tensor]:
        """Returns what this site has not sent of the changes of parameters, by name.

        Args:
            own: what this rank has not sent.
            params: the parameters in question.
        """
        return own

    def hooks(self, watched: Mapping[str, WatchedParameter]) -> Mapping[str, HeldHooks]:
        """Returns the held hooks of every parameter, by name."""
        return {name: one.hooks for name, one in watched.items()}

    def detach(self) -> None:
        """Removes this rank's own hooks."""

    # -- what users see -------------------------------------------------------------------------

    def explained(self, lines: Coverage) -> Coverage:
        """Adds to a coverage how the ranks share the work."""
        return lines

    def state(self) -> StateDict:
        """Returns what a saved state says of this rank."""
        return {}

    def refuse_state(self, state: StateDict | Sequence[StateDict], owner: Owner) -> None:
        """Raises ValueError on all ranks if a rank of the site cannot load its state."""

    def objections(self) -> Iterator[tuple[bool, str]]:
        """Yields conditions under which `session.join()` is refused, each with its reason."""
        yield from ()

    def make_equal(self, replica: ReplicaState) -> None:
        """Makes the replicas inside the site equal, after a joined loop."""

    def compared(self, tensors: Mapping[str, Tensor | None]) -> Drift | None:
        """Compares tensors that should be equal everywhere; None if they are.

        Args:
            tensors: by name, in an order that is the same on all sites; None for a missing one.
        """
        gather = partial(words_of_all, self._comm, lane=LANE)
        return compared(
            gather, tensors, [range(self._comm.world_size)], partial(named, self._comm.sites)
        )

    def make_all_equal(self, replica: ReplicaState) -> bool:
        """Makes every replica that of site 0; returns whether two differed."""
        return replica.make_equal(self._comm, 0)

    def refuse_make_equal(self) -> None:
        """Raises RuntimeError if `session.make_equal()` cannot make equal what the ranks hold."""
