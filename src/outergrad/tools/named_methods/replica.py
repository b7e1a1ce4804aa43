"""A site's copy of a model that is trained."""

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outergrad as og


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This site's copy of the model.

    Attributes:
        model: What to call and to train.
        session: Its session, where outergrad exchanges the gradients.
        start_bytes: What the session had sent before the first step.
        period: Steps from one of the session's exchanges to the next.
        planned_bytes: Gradient bytes per step where there is no session, if known beforehand.
    """

    model: nn.Module
    session: og.Session | None = None
    start_bytes: int = 0
    period: int = 1
    planned_bytes: int | None = None

    @property
    def sent_bytes(self) -> int | None:
        """Gradient bytes that this site sends per step, on average; None if nobody counts them."""
        if not self.session:
            return self.planned_bytes
        stats = self.session.stats()
        steps = self.period * max(stats.step, 1)
        return round((stats.total_sent_bytes - self.start_bytes) / steps)

    def total_sent_bytes(self, steps: int) -> int | None:
        """Gradient bytes that this site has sent in so many steps; None if nobody counts them."""
        if self.session:
            return self.session.stats().total_sent_bytes - self.start_bytes
        return None if self.planned_bytes is None else steps * self.planned_bytes

    def finish(self) -> None:
        """Shares what the last local steps changed; every site must call it after its last step."""
        if self.session:
            self.session.flush()

    def close(self) -> None:
        """Leaves a plain model."""
        if self.session:
            self.session.detach()
        # A class attribute of PyTorch's, which forwards in several threads may leave behind.
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is self.model:
            DistributedDataParallel._active_ddp_module = None
