"""Replica: a site's copy of a model that is trained."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outergrad as og


class Peer(Protocol):
    """Third-party method, which synchronises by itself whenever an optimizer steps."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this site has sent in all exchanges so far."""
        ...

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far."""
        ...

    def flush(self) -> None:
        """Shares the changes of the last local steps; every site must call it."""
        ...

    def detach(self) -> None:
        """Ends the exchanges."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns this site's checkpoint state, in addition to the model and the optimizer."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from a state.

        Raises:
            ValueError: It is that of another number of sites, or of another model.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Replica:
    """This site's copy of the model.

    Attributes:
        model: Model to call and to train.
        session: Its session, where outergrad synchronises the gradients.
        peer: Third-party method that synchronises, where neither outergrad nor PyTorch does.
        start_bytes: Bytes that the session had sent before the first step.
        period: Steps from one of the session's exchanges to the next.
        planned_bytes: Gradient bytes per step where there is neither session nor peer, if known.
        weighted: True if the session weights a site by its samples, so that no loss need do so.
    """

    model: nn.Module
    session: og.Session | None = None
    peer: Peer | None = None
    start_bytes: int = 0
    period: int = 1
    planned_bytes: int | None = None
    weighted: bool = False

    @property
    def sent_bytes(self) -> int | None:
        """Gradient bytes that this site sends per step, on average; None if nothing counts them."""
        if self.peer:
            return round(self.peer.sent_bytes / max(self.peer.steps, 1))
        if not self.session:
            return self.planned_bytes
        stats = self.session.stats()
        steps = self.period * max(stats.step, 1)
        return round((stats.total_sent_bytes - self.start_bytes) / steps)

    def total_sent_bytes(self, steps: int) -> int | None:
        """Gradient bytes that this site has sent in `steps` steps; None if nothing counts them."""
        if self.peer:
            return self.peer.sent_bytes
        if self.session:
            return self.session.stats().total_sent_bytes - self.start_bytes
        return None if self.planned_bytes is None else steps * self.planned_bytes

    def finish(self) -> None:
        """Shares the last local steps' changes; every site must call it after its last step."""
        if self.session:
            self.session.flush()
        if self.peer:
            self.peer.flush()

    def close(self) -> None:
        """Detaches the session and the peer, which leaves a plain model."""
        if self.session:
            self.session.detach()
        if self.peer:
            self.peer.detach()
        # A class attribute of DDP, which forward passes in several threads may leave set.
        if getattr(DistributedDataParallel, "_active_ddp_module", None) is self.model:
            DistributedDataParallel._active_ddp_module = None
