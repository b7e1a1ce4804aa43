"""The exceptions of shared steps: those that users meet, and those that become one of these."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class SiteLostError(RuntimeError):
    """Another site died, hangs or is cut off: its connections cannot be used any more.

    This site has not applied the step, and has no gradients of it.

    Attributes:
        sites: which are lost, as far as this site can tell; none where only a connection is.
        step: synchronised steps before the one in which it was noticed.
        place: what this site waited for: a layer's gradients, or what comes before and after them.
        certain: whether it is known that no site has applied the step, and that no site that left
            word lacks one that this site has made. False where this site had all messages of the
            step, said so, and then did not hear from all others how they ended: one of `may_differ`
            may have applied it. False, too, where this site stood still, and ended a step by what
            had come before the others gave it up: those in `may_differ` have not made that step.
        may_differ: sites of which it is not known that they have made the same steps as this one:
            those that left no word of it, as a site that was killed, and those that did and have
            made another number. With the others this site agrees. With `mesh=` a site stands here
            if this is so of one of its ranks, also this one's own site.
        ranks: with `mesh=`, which ranks are lost, each as its site and its local rank.
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
        """Another one that says the same: what was raised holds on to what was going on."""
        about = self.sites, self.step, self.place
        known = {"certain": self.certain, "may_differ": self.may_differ}
        return SiteLostError(str(self), *about, **known, ranks=self.ranks)


class StepDiscardedError(RuntimeError):
    """The backward of another site raised, or a message was damaged: the step is void everywhere.

    After `optimizer.zero_grad()` training goes on with the next.
    """


class SitesChangedError(StepDiscardedError):
    """Other sites take part from now on; the step is void everywhere.

    Raised once, on all sites that take part, in the same step. After `optimizer.zero_grad()`
    training goes on with the next, whose gradients are means over these sites.

    Attributes:
        step: synchronised steps before the one that is void.
        sites: names of those that take part from now on, in the order of their ranks.
        lost: names of those that do not any more.
        epoch: how many times the sites have changed.
    """

    def __init__(
        self, message: str, step: int, sites: Sequence[str], lost: Sequence[str], epoch: int
    ) -> None:
        super().__init__(message)
        self.step, self.sites, self.lost, self.epoch = step, tuple(sites), tuple(lost), epoch


class BadStepsError(RuntimeError):
    """Too many steps after each other had gradients that were not finite.

    Attributes:
        site: the first whose own gradient was not, in the last of them.
        step: synchronised steps before that one.
        layer: full name of a parameter of which it was not.
    """

    def __init__(self, message: str, site: int, step: int, layer: str) -> None:
        super().__init__(message)
        self.site, self.step, self.layer = site, step, layer


class DriftError(RuntimeError):
    """The replicas differ. Raised on all sites, in the same words.

    After a comparison (`verify_every=`) the gradients of the step are in `param.grad`; where sites
    are found to have received different messages or sums in a step before, this one is applied
    nowhere. After `session.make_equal()` on every site training goes on.

    Attributes:
        sites: those whose replica is not that of site 0, or that of most.
        step: synchronised steps so far.
        parameter: full name of the first parameter or buffer that differs; empty where it is not
            known.
    """

    def __init__(self, message: str, sites: Sequence[int], step: int, parameter: str) -> None:
        super().__init__(message)
        self.sites, self.step, self.parameter = tuple(sites), step, parameter


class Failure(Enum):
    """Why an exchange failed, in words that users are told."""

    TIMEOUT = "no answer in time"
    CLOSED = "the connection was closed"
    TRANSPORT = "the transport failed"
    """For another reason, which it tells."""
    DAMAGED = "a message cannot be right"
    """What a site sent cannot belong to this step."""
    LOCAL = "this site cannot go on"
    """Itself: whatever the others have sent."""


class ExchangeError(RuntimeError):
    """The other sites are out of reach, or sent what cannot belong to this step.

    Attributes:
        sites: those out of reach, as far as this site can tell by itself.
        kind: why; what is done about it goes by this, never by the message.
        waited_s: how long it had waited for them.
        ranks: with `mesh=`, the numbers of the ranks that are out of reach, where that is known.
    """

    def __init__(
        self, message: str, sites: Sequence[int] = (), *, kind: Failure = Failure.DAMAGED
    ) -> None:
        super().__init__(message)
        self.sites, self.kind, self.waited_s = tuple(sites), kind, 0.0
        self.ranks: tuple[int, ...] = ()


class BoardGoneError(RuntimeError):
    """The place where sites agree on what counts did not answer in time."""


class RefusedError(RuntimeError):
    """A message was not as it had been sent, or does not say what it should.

    Attributes:
        site: whose.
        param: full name of a parameter of the module whose replay was not like its forward; empty
            where the message itself is damaged.
    """

    def __init__(self, message: str, site: int, param: str = "") -> None:
        super().__init__(message)
        self.site, self.param = site, param


class OverwrittenError(RuntimeError):
    """What a layer's own backward had was written to or freed before its message started.

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
    """A replay failed, or gave something else than the forward.

    Attributes:
        site: whose forward it was.
        member: which of the block's modules.
    """

    def __init__(self, site: int, member: int) -> None:
        super().__init__(f"module {member} of a block of site {site}")
        self.site, self.member = site, member
