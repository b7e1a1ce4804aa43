"""`og.LocalSteps` between sites of several ranks, inside of which gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outergrad.methods.local_steps import LocalSteps
from outergrad.session.inspect import Inspection
from outergrad.session.local_steps import LocalStepsSession
from outergrad.session.mesh.levels import Levels
from outergrad.session.mesh.mesh_session import MeshSession
from outergrad.session.session import Session
from outergrad.session.settings import Settings


class MeshLocalSteps(MeshSession, LocalStepsSession):
    """Session of `og.LocalSteps` over sites of several ranks, which step as one.

    An inner session averages the gradients of a site's ranks, so that these stay replicas.

    Args:
        inspection: of the model, as for `LocalStepsSession`.
        levels: the ranks.
        fingerprint: what they have agreed on.
        settings: the user's.
        method: says after how many steps the sites exchange how their weights have changed.
        inner: averages the gradients of a site's ranks in every backward.
    """

    def __init__(
        self,
        inspection: Inspection,
        levels: Levels,
        fingerprint: int,
        settings: Settings,
        method: LocalSteps,
        inner: Session,
    ) -> None:
        super().__init__(inspection, levels, fingerprint, settings, method)
        self._inner = inner

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients unshared among the ranks of this site, as `Session.no_sync`."""
        with self._inner.no_sync():
            yield

    def detach(self) -> None:
        """Ends the session between the sites, and the one inside this site."""
        self._inner.detach()
        super().detach()
