"""Session whose ranks hold shards of the model (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from threading import get_ident

from torch import nn
from torch.autograd.graph import get_gradient_edge

from outergrad.capture.changes import ModelWatch
from outergrad.capture.claims import HeldHooks, HookedClaim
from outergrad.capture.optimizer_steps import look_at_steps
from outergrad.core.model import Model
from outergrad.record.coverage import Coverage
from outergrad.session.inspect import Inspection
from outergrad.session.mesh.levels import Levels
from outergrad.session.mesh.mesh_session import MeshSession
from outergrad.session.mesh.mesh_step import MeshStep
from outergrad.session.mesh.shards import Sharded, Shards
from outergrad.session.mesh.share_planner import SharePlanner
from outergrad.session.session import Session
from outergrad.session.settings import Settings
from outergrad.session.stepping import Step
from outergrad.step.spec import StepSpec
from outergrad.step.unsynced import UnsyncedStep


class ShardedSession(MeshSession):
    """Session in which every rank shares its shards with its counterparts at the other sites.

    FSDP2 calls the hooks of sharded parameters once it has reduced their gradients. The mean over
    the sites is formed at the end of backward, after FSDP2's own callback there.
    """

    def __init__(
        self,
        inspection: Inspection,
        levels: Levels,
        fingerprint: int,
        settings: Settings,
        shards: Shards,
    ) -> None:
        super().__init__(inspection, levels, fingerprint, settings)
        self._shards, self._several = shards, True
        trained = {name: shards.params[name] for name in inspection.model.params}
        # HeldHooks look for the hooks of others at these nodes, which autograd frees and makes
        # anew unless somebody holds them.
        self._nodes = [get_gradient_edge(p).node for p in trained.values()]
        self._claims = {
            n: HookedClaim(p, self, partial(self.on_ready, n)) for n, p in trained.items()
        }

    def detach(self) -> None:
        """Ends the session, as `Session.detach`; FSDP2 goes on inside the site."""
        for claim in self._claims.values():
            claim.remove()
        super().detach()

    def watch(self, model: nn.Module, watch: ModelWatch) -> None:
        """Checks the model before optimizer steps only: else FSDP2 has its own tensors in it."""
        self._model_watch = lambda: watch
        self._thread = get_ident()
        look_at_steps(self)

    def on_ready(self, name: str) -> None:
        """Notes that FSDP2 has reduced the gradient of a shard; called by its hook."""
        with self._giving_up():
            step = self._current()
        step.captured.used.add(name)
        if isinstance(step, UnsyncedStep):
            self._unshared.add(name)

    def _hooks(self) -> dict[str, HeldHooks]:
        return {name: claim.hooks for name, claim in self._claims.items()}

    def _shares(self) -> Sequence[Model]:
        return [self._model] * self._levels.local.world_size

    def coverage(self) -> Coverage:
        """Returns how each of this rank's shards travels, as `Session.coverage`."""
        return Session.coverage(self)

    def _inside(self, planner: SharePlanner, model: Model) -> Sharded:
        return Sharded(self._shards, model, self._levels.local)

    def _step_of_spec(self, spec: StepSpec) -> MeshStep:
        """Counts gradients of earlier `no_sync` passes as used; FSDP2's hooks add this pass's."""
        return super()._step_of_spec(replace(spec, used={*spec.used, *self._unshared}))

    def _begin(self, task: int) -> Step:
        step = super()._begin(task)
        for claim in self._claims.values():
            claim.hooks.hold()
        return step

    def _objections(self) -> Iterator[tuple[bool, str]]:
        yield (
            True,
            "the forward of a model of fully_shard() waits for all ranks of its site, also for "
            "those that have run out: use loops of equal length",
        )

    def _refuse_changed(self, used: Set[str]) -> None:
        for name in self._frozen:
            if self._shards.params[name].requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the model was distributed and would not be shared: "
                    f"call session.detach() and og.distribute(model, ...) again on every rank"
                )
