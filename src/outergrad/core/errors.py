"""Exceptions of synchronised steps: public ones, and internal ones that are translated to them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class SiteLostError(RuntimeError):
    """A site was lost: it died, hangs or is cut off, and its connections cannot be used any more.

    This site has not applied the step, and has no gradients of it.

    Attributes:
        sites: the lost sites, as far as this site can tell; empty where only a connection is lost.
        step: number of synchronised steps before the one in which the loss was noticed.
        place: what this site was waiting for: a layer's gradients, or a message before or after
            the gradients.
        certain: True if it is known that no site has applied the step, and that no site that left
            a report lacks a step that this site has made. False where this site had all messages
            of the step, reported this, and then did not hear from all others how they ended: a
            site in `may_differ` may have applied the step. Also False where this site was
            suspended, and completed a step from messages that had come before the others gave
            it up: the sites in `may_differ` have not made that step.
        may_differ: sites that are not known to have made the same steps as this one: those that
            left no report, such as a killed site, and those that reported another number of steps.
            All other sites agree with this one. With `mesh=` a site is listed if this holds for
            one of its ranks; this rank's own site may be listed, too.
        ranks: with `mesh=`, the lost ranks, each as its site and its local rank.
    """

    def __init__(
        self,
        message: str,
        sites: Sequence[int],
        step: int,
        place: str,
        *,
        certain: bool = True,
        may_differ: Sequence[int] = (),
        ranks: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(message)
        self.sites, self.step, self.place = tuple(sites), step, place
        self.certain, self.may_differ, self.ranks = certain, tuple(may_differ), tuple(ranks)

    def again(self) -> SiteLostError:
        """Returns a copy without traceback: a raised error keeps its frames and their tensors."""
        about = self.sites, self.step, self.place
        known = {"certain": self.certain, "may_differ": self.may_differ}
        return SiteLostError(str(self), *about, **known, ranks=self.ranks)


class StepDiscardedError(RuntimeError):
    """The step was discarded on all sites: one site's backward raised, or a message was damaged.

    After `optimizer.zero_grad()` training can continue with the next step.
    """


class SitesChangedError(StepDiscardedError):
    """The set of sites changed, and the step was discarded on all of them.

    Raised once, in the same step on all sites that take part from now on. After
    `optimizer.zero_grad()` training can continue with the next step, whose gradients are means over
    the new set of sites.

    Attributes:
        step: number of synchronised steps before the discarded one.
        sites: names of the sites that take part from now on, in the order of their ranks.
        lost: names of the sites that no longer take part.
        epoch: number of times that the set of sites has changed.
    """

    def __init__(
        self, message: str, step: int, sites: Sequence[str], lost: Sequence[str], epoch: int
    ) -> None:
        super().__init__(message)
        self.step, self.sites, self.lost, self.epoch = step, tuple(sites), tuple(lost), epoch


class BadStepsError(RuntimeError):
    """Too many consecutive steps had gradients that were not finite.

    Attributes:
        site: the first site whose own gradient was not finite in the last of these steps.
        step: number of synchronised steps before that one.
        layer: full name of a parameter whose gradient was not finite.
    """

    def __init__(self, message: str, site: int, step: int, layer: str) -> None:
        super().__init__(message)
        self.site, self.step, self.layer = site, step, layer


class DriftError(RuntimeError):
    """The replicas differ. Raised on all sites, with the same message.

    After a comparison (`verify_every=`) the gradients of the step are in `param.grad`. Where sites
    are found to have received different messages or sums in an earlier step, the current step is
    applied nowhere. After `session.make_equal()` on every site training can continue.

    Attributes:
        sites: sites whose replica differs from that of site 0, or from that of most sites.
        step: number of synchronised steps so far.
        parameter: full name of the first parameter or buffer that differs; empty where unknown.
    """

    def __init__(self, message: str, sites: Sequence[int], step: int, parameter: str) -> None:
        super().__init__(message)
        self.sites, self.step, self.parameter = tuple(sites), step, parameter


class BudgetSpentError(RuntimeError):
    """The next step would exceed the budget of privacy; raised at all sites before the same step.

    Attributes:
        spent: ε so far.
        stop_at: ε that was allowed.
        steps: how many steps were released.
    """

    def __init__(self, message: str, spent: float, stop_at: float, steps: int) -> None:
        super().__init__(message)
        self.spent, self.stop_at, self.steps = spent, stop_at, steps


class Failure(Enum):
    """Cause of a failed exchange, worded for users."""

    TIMEOUT = "no answer in time"
    CLOSED = "the connection was closed"
    TRANSPORT = "the transport failed"
    """The transport failed for another reason, given in its message."""
    DAMAGED = "a message cannot be right"
    """A received message cannot belong to this step."""
    LOCAL = "this site cannot go on"
    """The cause lies on this site, whatever the others have sent."""


class ExchangeError(RuntimeError):
    """The other sites are out of reach, or a message cannot belong to this step.

    Attributes:
        sites: the unreachable sites, as far as this site alone can tell.
        kind: the cause; callers decide by it, never by the message.
        waited_s: seconds that this site had waited for them.
        ranks: with `mesh=`, the numbers of the unreachable ranks, where known.
    """

    def __init__(
        self, message: str, sites: Sequence[int] = (), *, kind: Failure = Failure.DAMAGED
    ) -> None:
        super().__init__(message)
        self.sites, self.kind, self.waited_s = tuple(sites), kind, 0.0
        self.ranks: tuple[int, ...] = ()


class BoardGoneError(RuntimeError):
    """The board on which sites agree about steps did not answer in time."""


class RefusedError(RuntimeError):
    """A message was not received as it was sent, or holds invalid values.

    Attributes:
        site: the sender.
        param: full name of a parameter of the module whose replay differs from its forward; empty
            where the message itself is damaged.
    """

    def __init__(self, message: str, site: int, param: str = "") -> None:
        super().__init__(message)
        self.site, self.param = site, param


class OverwrittenError(RuntimeError):
    """A layer's activations or deltas were overwritten or freed before its message started.

    Attributes:
        param: full name of a parameter of the layer.
    """

    def __init__(self, param: str) -> None:
        told = "were written to or freed after the layer's own backward"
        super().__init__(
            f"{param!r}: the activations or deltas that make its gradient {told}, before they were "
            f"read; from now on copies are kept where somebody does so: call optimizer.zero_grad() "
            f"and go on, or pass og.Dense() for it"
        )
        self.param = param


class ReplayError(Exception):
    """A replay failed, or its output differs from the forward's.

    Attributes:
        site: the site that ran the forward.
        member: index of the module within the block.
    """

    def __init__(self, site: int, member: int) -> None:
        super().__init__(f"module {member} of a block")
        self.site, self.member = site, member
